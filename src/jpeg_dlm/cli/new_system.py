"""jpeg-dlm new-system: a package with a system of your own, which begins as the toy system in `template`"""

from __future__ import annotations

import argparse
import ast
import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.methods.registry import methods
from jpeg_dlm.util.errors import UsageError, command
from jpeg_dlm.util.files import atomic_directory, write_atomic

TEMPLATE = Path(__file__).parent / "template"
FILES = ("pyproject.toml", "toy_system.py", "test_toy_system.py")
LONGEST = 40  # characters of a name


def add_new_system_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="its name in commands, such as my-system; also the folder to write")


def run_new_system(args: argparse.Namespace) -> None:
    name: str = args.name
    texts = {file: (TEMPLATE / file).read_text("utf-8") for file in FILES}
    module, title = name.replace("-", "_"), "".join(map(str.capitalize, name.split("-")))
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > LONGEST:
        rule = f"at most {LONGEST} small letters, digits and single dashes, beginning with a letter"
        raise UsageError(f"The name of a system has {rule}, such as my-system, not '{name}'.")
    spec, system = find_spec(module), ast.walk(ast.parse(texts["toy_system.py"]))
    used = {*keyword.kwlist, *(node.id for node in system if isinstance(node, ast.Name))}
    if name in (*methods(), "all") or (spec and spec.origin) or {module, title} & used:
        raise UsageError(f"'{name}' is already the name of a system, a module or a class: choose another.")

    def renamed(text: str) -> str:
        return re.sub("toy_system|Toy|toy", lambda match: {"toy_system": module, "Toy": title, "toy": name}[match[0]], text)

    with atomic_directory(Path(name), new=True) as folder:
        for file, text in texts.items():
            write_atomic(folder / renamed(file), renamed(text))
    print(f"Wrote '{name}': {', '.join(map(renamed, FILES))}. What to do next:\n")
    run = f"runs/{name}"
    train = command("train", "--preset", "smoke", "--method", name, "--out", run)
    for line in (f"pip install -e ./{name}", f"pytest {name}", train, command("generate", run)):
        print(f"   {line}")
