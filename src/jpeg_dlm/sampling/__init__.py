"""Prompts and templates, and long texts block by block."""
