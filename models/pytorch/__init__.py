"""The engine for CUDA GPUs, and for what OpenVINO cannot convert, in plain PyTorch."""
