"""Experiments made of several trained configurations."""
