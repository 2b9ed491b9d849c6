"""What goes wrong with models: the errors that the worker knows, and how a failure becomes one line for the
user."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

from logs import escaped
from run import ConfigError, Json

logger = logging.getLogger("model")

# How the classes of classifiers, reward models and encoders end.
NO_GENERATION = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "RewardModel",
)
PROGRESS_S = 10.0
MAX_LINE = 1000  # characters of an error that a child process prints
# OpenVINO's messages begin with lines of its source code, and end with the reason.
OPENVINO_SOURCE_LINES = ("Exception from ", "Check '")
OUT_OF_MEMORY = re.compile("bad_alloc|MemoryError|out of memory|allocate .*memory", re.IGNORECASE)


class ModelError(Exception):
    """A model that cannot be served; the message is one line, for the user."""


class MachineError(ModelError):
    """The machine is at fault: its memory, its time."""


class DeviceLost(Exception):
    """An unrecoverable device error, raised by `forward`; restart the process."""


def check_length_limit(model: str, limit: int | None, length: int) -> None:
    """Raises ModelError for slots of more than `limit` tokens, the `length_limit` of the manifest of `model`;
    None: there is no limit. length: of a slot."""
    if limit and length > limit:
        raise ModelError(
            f"{model} changes its positions or its attention beyond {limit} tokens; give --max-total-tokens "
            f"{limit} or less"
        )


def reject_by_config(config_json: Json) -> None:
    """Raises ModelError for an encoder-decoder, or a model that generates no text, by its config.json.
    Families are not checked here."""
    if config_json.get("is_encoder_decoder"):
        kind = config_json.get("model_type")
        raise ModelError(f"{kind} models are encoder-decoder models; only decoder-only models are supported")
    for name in config_json.get("architectures") or ():
        # With tied embeddings such a model would load, and write nonsense.
        if str(name).endswith(NO_GENERATION):
            raise ModelError(f"{name} (architectures in config.json) generates no text; nothing to serve")


def warn_text_only(model: str, fault: str) -> None:
    """Logs that a model that reads images is served without its vision tower, and why."""
    logger.warning("%s: only the text part of this model is served, without images: %s", model, fault)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated: torch and OpenVINO raise a RuntimeError for it, too, and
    `reported_as` makes a ModelError of it."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


def first_line(error: BaseException) -> str:
    """Returns what says best, in one line, what went wrong: the first line of an error's message, with the
    next one if it ends with a colon; of OpenVINO's own messages the last line; of an error without a message
    the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith(OPENVINO_SOURCE_LINES):
        return lines[-1]
    if lines[0].endswith(":"):  # the reason is in the next one
        return " ".join(lines[:2])
    return lines[0]


def named(error: BaseException) -> str:
    """Returns the type and the `first_line` of an error, as in "ValueError: no such file"; the type alone if
    it has no message."""
    return ": ".join(dict.fromkeys((type(error).__name__, first_line(error))))


@contextlib.contextmanager
def reported_as(failure: str, explain: Callable[[BaseException], str] = named) -> Iterator[None]:
    """Turns an Exception of the body into a ModelError of one line: `failure`, then what `explain` makes of
    the exception. A ModelError of the body stays as it is; a ConfigError does not. The traceback of others is
    logged at debug level."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        logger.debug(failure, exc_info=True)
        raise ModelError(f"{failure}: {explain(error)}") from None


def run_program(work: Callable[..., None], *kinds: type) -> None:
    """Calls `work` with the arguments of this process, each converted by its type in `kinds`, and returns if
    it succeeds. A failure ends the process with the reason as the last line of stderr; the exit code is
    ENOMEM if memory could not be allocated, else 1."""
    try:
        work(*(kind(argument) for kind, argument in zip(kinds, sys.argv[1:])))
    except Exception as error:
        is_explained = isinstance(error, (ModelError, ConfigError))
        reason = escaped(error if is_explained else named(error), MAX_LINE)
        if not is_out_of_memory(error):
            sys.exit(reason)
        print(reason, file=sys.stderr)
        sys.exit(errno.ENOMEM)


class Progress:
    text = ""  # what takes long at present, and how far it is


progress = Progress()  # of this process, for the status that it sends


@contextlib.contextmanager
def progress_logged(what: str, measure: Callable[[], str] = str, is_logged: bool = True) -> Iterator[None]:
    """Keeps in `progress.text` what takes long while the body runs: `what`, and every PROGRESS_S seconds also
    how long the body has run and what `measure` returns, such as ": 12 of 93 MB". The text is "" afterwards,
    also after an inner call. Starts a thread, in which `measure` runs, which must not raise. is_logged:
    whether the text is logged every PROGRESS_S seconds, too."""
    done = threading.Event()
    started_at = time.monotonic()

    def log_progress() -> None:
        while not done.wait(PROGRESS_S):
            measured = measure()
            if not done.is_set():
                progress.text = f"{what} after {time.monotonic() - started_at:.0f} s{measured}"
                if is_logged:
                    logger.info("Still %s", progress.text)

    progress.text = what
    threading.Thread(target=log_progress, name="progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        progress.text = ""
