"""The machine: CPU, processes, console and progress."""
