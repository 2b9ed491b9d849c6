"""The part of models that reads images: towers, how their embeddings stand in a prompt, and a cache."""
