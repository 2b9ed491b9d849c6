"""What a model writes, as parts: text, reasoning and calls of tools."""
