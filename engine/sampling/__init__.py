"""The next token of each row: parameters, loops over the vocabulary, draft tokens."""
