"""Networks: they know tensors and sizes, nothing of text, diffusion or files."""
