"""Bodies, fields and types, errors, stored responses, the worker as an API server process sees it."""
