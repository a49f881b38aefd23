"""Batches of samples with one seed per sample; it knows a method's contract and nothing of training."""
