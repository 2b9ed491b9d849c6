"""From what a person names to a plain checkpoint: the hub, folders, GGUF, quantized weights, adapters."""
