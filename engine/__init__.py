"""Requests on the device: what each step runs, sampling, and the messages to the web processes. Runs in the worker."""
