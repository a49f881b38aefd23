"""`python -m jpeg_dlm VERB ...`, which torchrun can start too."""

from jpeg_dlm.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
