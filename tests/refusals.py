"""What a command that is refused says."""

from jpeg_dlm.cli.main import main


def refusal(capsys, argv, code):
    """The one sentence with which a command is refused; `code` is its exit code, or several that it may be."""
    assert main([str(word) for word in argv]) in (code if isinstance(code, tuple) else (code,))
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and output.out == "", output
    return lines[0]
