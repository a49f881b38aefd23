"""Networks, defined by tensors and sizes, independent of text, diffusion and files."""
