"""Reading checkpoints of other programs."""
