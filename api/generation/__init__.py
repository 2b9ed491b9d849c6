"""A request that is ready to run, while it runs, and the response that grows with it."""
