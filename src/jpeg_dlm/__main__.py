"""`python -m jpeg_dlm VERB ...`, as torchrun starts it."""

from jpeg_dlm.cli.main import main

raise SystemExit(main())
