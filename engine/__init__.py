"""Requests on the device: what each step runs, sampling, and messages to the API server processes."""
