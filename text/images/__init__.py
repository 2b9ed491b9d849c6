"""Images of requests: their files, and how the processor of a model's family cuts and scales them."""
