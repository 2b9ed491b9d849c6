"""The engine for CPUs, through OpenVINO, and the conversion of checkpoints."""
