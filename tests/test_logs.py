"""The log: one line an event, which nothing breaks or floods; what repeats is left out, and what does not is not."""

import ast
import io
import json
import logging
import re
import time

import pytest
from documents import FILES

import logs


@pytest.fixture
def log(monkeypatch, request):
    """The lines that have been logged since the last call; `set_up` with `info` and text, or with what a test gives."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(logs.sys, "stderr", stream)
    logs.set_up(*getattr(request, "param", ("info", False)))

    def lines():
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return text.splitlines()

    yield lines
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in logs.APP_LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.parametrize("level", ["warning", "error"])
def test_a_warning_or_error_that_repeats_without_end_is_logged_a_few_times_with_its_count(log, level):
    for n in range(5000):
        getattr(logging.getLogger("worker"), level)("request %s cannot be run", n)
    lines = log()
    assert len(lines) == logs.REPEATS + 2
    assert lines[-1].endswith("worker: request 999 cannot be run (line 1000 of this kind within a minute)")


def test_refused_requests_are_logged_at_info_a_few_times_a_minute(log):
    for n in range(200):
        logging.getLogger("web").info("request rejected", extra={"fields": {"request_id": n}, "is_limited": True})
    assert len(log()) == logs.REPEATS + 1


def test_lines_of_other_kinds_and_those_of_requests_are_all_logged(log):
    for n in range(100):
        logging.getLogger("worker").info("request finished", extra={"fields": {"request_id": n}})
        logging.getLogger("worker").error("an error of its own kind, 0" + str(n))
    assert len(log()) == 200


def test_a_minute_later_the_lines_are_logged_again(log):
    for _ in range(100):
        logging.getLogger("worker").error("again")
    log()
    of_error = {"levelno": logging.ERROR, "levelname": "ERROR"}
    later = logging.makeLogRecord({"name": "worker", "msg": "again", "created": time.time() + 61, **of_error})
    logging.getLogger("worker").handle(later)
    assert len(log()) == 1


@pytest.mark.parametrize("log", [("debug", False)], indirect=True)
def test_at_debug_libraries_log_warnings_and_no_more(log):
    for name in (*logs.APP_LOGGERS, "numba.core.ssa"):
        logging.getLogger(name).debug("step")
        logging.getLogger(name).warning("careful")
    lines = log()
    assert [line.split()[2] for line in lines if line.endswith("step")] == [f"{name}:" for name in logs.APP_LOGGERS]
    assert sum(line.endswith("numba.core.ssa: careful") for line in lines) == 1


def test_every_logger_of_the_product_counts_as_ours():
    named = {name for path in FILES for name in re.findall(r'^logger = .*getLogger\("(.*)"\)', path.read_text(), re.M)}
    assert named and named <= set(logs.APP_LOGGERS)


def log_of_all_kinds():
    fields = {"request": 7, "path": "/\n" + "a" * 5000}
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("web").exception("it is %d\nlines %s", 2, "x" * 5000, extra={"fields": fields})


def test_a_message_has_a_place_for_each_of_its_values_and_no_doubled_sign_where_it_has_none():
    seen = 0
    for path in FILES:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not re.fullmatch(
                r"logger\.(debug|info|warning|error)", ast.unparse(call.func)
            ):
                continue
            message, *values = call.args
            if not isinstance(message, ast.Constant) or any(isinstance(value, ast.Starred) for value in values):
                continue
            places = re.findall(r"%(?!%)", message.value.replace("%%", ""))
            assert (len(places) == len(values)) if values else "%%" not in message.value, ast.unparse(call)
            seen += 1
    assert seen > 50


def test_a_log_line_carries_named_values_and_nothing_breaks_or_floods_it(log):
    log_of_all_kinds()
    line, *trace = log()
    assert len(line) < 1400 and trace[-1] == "ValueError: wrong"
    assert "Z ERROR web: it is 2\\nlines xxx" in line and "x... request=7 path=/\\naaa" in line


@pytest.mark.parametrize("log", [("info", True)], indirect=True)
def test_a_json_log_line_carries_named_values_and_the_traceback_in_one_line(log):
    log_of_all_kinds()
    (line,) = map(json.loads, log())
    assert list(line) == ["timestamp", "level", "target", "fields"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"])
    fields = line["fields"]
    assert fields["request"] == 7 and len(fields["path"]) < 210 and "\n" not in fields["path"]
    assert fields["message"].startswith("it is 2\\nlines xxx") and "x...\nTraceback" in fields["message"]
    assert fields["message"].endswith("ValueError: wrong")
