"""GGUF files: the container that holds a model's keys, its tokenizer and its tensors."""
