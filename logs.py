"""The log: one line per event on stderr, as text or as JSON.

Owns the format of a line, which nothing that a client sends or a model folder says can break or flood.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from typing import Any

# This server's loggers. Libraries log warnings and errors only: at `debug`, numba alone writes 24,000 lines
# at a first startup, and HTTP clients write signed URLs, with which anyone may download.
APP_LOGGERS = ("compile", "config", "engine_client", "model", "protocol", "web", "worker")
PLAIN_LINE = "%(asctime)s %(levelname)-5s %(name)s: %(message)s"
REPEATS = 10  # lines a minute of one kind of warning or error


def escaped(value: Any, limit: int) -> str:
    """Returns `str(value)` on one line, for the log. Characters that cannot be printed, such as line ends,
    become escapes. A text of more than `limit` characters is truncated there and ends in "..."; escapes may
    make the line longer than that."""
    text = str(value)
    if len(text) > limit:
        text = text[:limit] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _PlainFormatter(logging.Formatter):
    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line with the record's named values (`fields`) at the end, without the traceback that
        may follow. The message is truncated at 1,000 characters, each value at 200 (`escaped`).
        `record.message` gets the truncated message."""
        record.message = escaped(record.message, 1000)
        fields = getattr(record, "fields", {})
        named = "".join(f" {name}={escaped(value, 200)}" for name, value in fields.items())
        return super().formatMessage(record) + named


class _JsonFormatter(_PlainFormatter):
    def format(self, record: logging.LogRecord) -> str:
        """Returns a JSON object with the time, the level, the logger (`target`) and `fields`: the message and
        the named values of the record. A traceback is a part of the message. The message and texts are
        truncated as in a plain line; the traceback and other values stay whole. Raises TypeError for a value
        that JSON does not have."""
        message = escaped(record.getMessage(), 1000)
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        fields = {"message": message}
        for name, value in getattr(record, "fields", {}).items():
            fields[name] = escaped(value, 200) if isinstance(value, str) else value
        line = {
            "timestamp": self.formatTime(record),
            "level": record.levelname,
            "target": record.name,
            "fields": fields,
        }
        return json.dumps(line)


class RateLimitFilter(logging.Filter):
    """Drops repeated warnings, errors and lines with `is_limited`. After REPEATS lines of a kind in a minute,
    only the 100th, 1,000th and so on are logged, with their number.

    Lines are of one kind if they have the same logger and the same message before values are filled in.
    """

    def __init__(self):
        super().__init__()
        self._began = 0.0
        self._counts: Counter[tuple[str, Any]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is logged: always below a warning without `is_limited`. Counts all other
        records. From REPEATS + 1 on, the record's message gets its number within the minute."""
        if record.levelno < logging.WARNING and not getattr(record, "is_limited", False):
            return True
        if not 0 <= record.created - self._began < 60:
            self._began = record.created
            self._counts.clear()
        what = record.msg if isinstance(record.msg, str) else type(record.msg)
        self._counts[record.name, what] += 1
        count = self._counts[record.name, what]
        if count <= REPEATS:
            return True
        record.msg = f"{record.getMessage()} (line {count} of this kind within a minute)"
        record.args = ()
        return count == 10 ** (len(str(count)) - 1)


def set_up(level: str, as_json: bool) -> None:
    """Sends the log of this process to stderr, one line per event, and replaces all other handlers of the
    root logger. `logger.info(message, extra={"fields": {...}})` adds named values.

    level: the lowest level that is logged of this server's loggers: "debug", "info", "warn" or "error".
    Libraries log warnings and errors; with "error", only errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RateLimitFilter())
    handler.setFormatter(_JsonFormatter() if as_json else _PlainFormatter(PLAIN_LINE))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("ERROR" if level == "error" else "WARNING")
    for name in APP_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())
