"""What streaming cannot cost less than, with this web server: a gunicorn application that writes events it was given, each
when a step would bring it, and does nothing else. BARE_EVENTS is a file with them, as JSON; BARE_STEP_MS is a step.

    BARE_EVENTS=events.json BARE_STEP_MS=26.7 gunicorn --worker-class gthread --threads 136 --chdir bench bare:app
"""

import itertools
import json
import os
import time
from pathlib import Path

EVENTS = [event.encode() for event in json.loads(Path(os.environ["BARE_EVENTS"]).read_text())]
STEP_S = float(os.environ["BARE_STEP_MS"]) / 1e3


def app(environ, start_response):
    environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    return stream()


def stream():
    next_at = time.monotonic()
    for event in itertools.cycle(EVENTS):
        next_at += STEP_S
        time.sleep(max(0.0, next_at - time.monotonic()))
        yield event
