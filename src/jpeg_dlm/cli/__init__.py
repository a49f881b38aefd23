"""The command line: one module per verb; none imports torch before it runs."""
