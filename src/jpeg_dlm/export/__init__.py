"""Models that sample without torch's networks: ONNX and OpenVINO files, and Algorithm 2 on them."""
