"""Text to token ids and back: tokenizer, chat templates, tool formats, grammars."""
