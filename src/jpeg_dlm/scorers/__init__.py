"""Language models that judge text."""
