"""The HTTP APIs, one file or folder each, and what they share. Runs in the API server processes."""
