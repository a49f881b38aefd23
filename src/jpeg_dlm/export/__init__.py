"""Models that sample without torch's networks: ONNX and OpenVINO files, and the sampler that runs them."""
