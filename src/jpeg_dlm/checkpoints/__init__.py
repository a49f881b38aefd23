"""Folders of models and checkpoints."""
