"""Pinned files from the package registries."""
