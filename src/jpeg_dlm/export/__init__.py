"""JPEG-DLM in ONNX Runtime: graphs of its two networks, in fp32 and int8, and Algorithm 2 on them."""
