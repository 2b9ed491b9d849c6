"""The HTTP APIs, one file each, and what they share. Runs in the API server processes."""
