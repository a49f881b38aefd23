"""jpeg-dlm completion"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jpeg_dlm.cli.options import HelpAll, add_every_option
from jpeg_dlm.cli.parser import Parser

HOW = """add one of these lines to the configuration of your shell:
  source <(jpeg-dlm completion bash)      ~/.bashrc
  source <(jpeg-dlm completion zsh)       ~/.zshrc, after compinit
  jpeg-dlm completion fish | source       ~/.config/fish/config.fish"""


@dataclass(frozen=True)
class Level:
    """Completions after `jpeg-dlm WORDS`: further words with their help, and options."""

    words: tuple[str, ...]
    next: dict[str, str]
    options: list[argparse.Action]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="print the script that completes commands in this shell")
    parser.epilog = HOW


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    print(SCRIPTS[args.shell](list(levels())))
    return 0


def levels() -> Iterator[Level]:
    """Yield all levels of the command line, from the parsers of all verbs."""
    from jpeg_dlm.cli.main import VERBS, build_parser

    root = build_parser(None)
    yield _level((), root)
    for verb in VERBS:
        yield from _below((verb,), _next(build_parser(verb))[verb])


def _below(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Level]:
    for action in list(parser._actions):
        if isinstance(action, HelpAll):
            add_every_option(parser, action.groups, None)
    yield _level(words, parser)
    for word, sub in _next(parser).items():
        yield from _below((*words, word), sub)


def _next(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subs[0].choices) if subs else {}


def _level(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Level:
    said: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.choices and not action.option_strings:
            said = dict.fromkeys(map(str, action.choices), "")
    shown = [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]
    return Level(words, said, shown)


def bash_script(found: Sequence[Level]) -> str:
    """Return a completion function for bash, which falls back to file names."""
    ways = " | ".join(f'"{" ".join(level.words[:-1])} {level.words[-1]}"' for level in found if level.words)
    values: dict[str, list[str]] = {}  # cases by the words they offer; config options have the same values everywhere
    offered = []
    for level in found:
        name = " ".join(level.words)
        for action in level.options:
            if action.nargs != 0:
                cases = [f'*" {flag}"' if "." in flag else f'"{name} {flag}"' for flag in action.option_strings]
                values.setdefault(" ".join(map(str, action.choices or ())), []).extend(cases)
        flags = " ".join(flag for action in level.options for flag in action.option_strings)
        offered.append(f'      "{name}") next="{" ".join(level.next)}" words="{flags}" ;;')
    lines = [f'    {" | ".join(dict.fromkeys(cases))}) words="{words}" ;;' for words, cases in values.items()]
    return _BASH.replace("WAYS", ways).replace("VALUES", "\n".join(lines)).replace("OFFERED", "\n".join(offered))


_BASH = """_jpeg_dlm() {
  local cur="${COMP_WORDS[COMP_CWORD]}" last="${COMP_WORDS[COMP_CWORD-1]}" level="" next="" words="-" i
  COMPREPLY=()
  if [[ "$cur" == "=" ]]; then cur=""; fi  # --option=value arrives as three words
  if [[ "$last" == "=" ]]; then last="${COMP_WORDS[COMP_CWORD-2]}"; fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$level ${COMP_WORDS[i]}" in
      WAYS) level="${level:+$level }${COMP_WORDS[i]}" ;;
    esac
  done
  case "$level $last" in
VALUES
  esac
  if [[ "$words" == "-" ]]; then
    case "$level" in
OFFERED
    esac
    if [[ "$cur" != -* ]]; then words="$next"; fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -o bashdefault -F _jpeg_dlm jpeg-dlm"""


def zsh_script(found: Sequence[Level]) -> str:
    """Return the bash script for zsh's `bashcompinit`."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash_script(found)}"


def fish_script(found: Sequence[Level]) -> str:
    """Return a line with help for every word and option."""
    lines = []
    for level in found:
        deeper = f"not __fish_seen_subcommand_from {' '.join(level.next)}"
        seen = [f"__fish_seen_subcommand_from {word}" for word in level.words]
        start = f"complete -c jpeg-dlm -n {_fish('; and '.join([*seen, *([deeper] if level.next else [])]) or 'true')}"
        lines += [f"{start} -f -a {word} -d {_fish(said)}" for word, said in level.next.items()]
        for action in level.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings)
            value = (
                "" if action.nargs == 0 else f" -x -a {_fish(' '.join(map(str, action.choices)))}" if action.choices else " -r"
            )
            lines.append(f"{start} {flags}{value} -d {_fish((action.help or '').replace('%%', '%'))}")
    return "\n".join(lines)


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: dict[str, Callable[[Sequence[Level]], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
