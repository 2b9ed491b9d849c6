"""What the hub's library says, made fit for people: its errors as one line with what would help, its log without secrets.

Models are downloaded by `model.py`, and `plan.py` reads a single file; both say the same when they cannot. Knows of
huggingface_hub what 0.36 and 2.x have in common, and no torch, so that `plan` runs where there is none.
"""

from __future__ import annotations

import logging
import os
import sys


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def hush() -> None:
    """Has the hub's library draw no bars in a log, and log errors only, once: what it says of its requests holds addresses
    that are signed, with which anyone may download. `LOG_LEVEL=debug` shows everything."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    library = logging.getLogger("huggingface_hub")
    library.handlers.clear()  # it prints what goes to ours as well
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        library.setLevel(logging.ERROR)
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)


def token() -> str | None:
    """The token by its older name, which TGI takes, when there is none by the names that the library reads itself."""
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return None
    return os.environ.get("HF_API_TOKEN") or None


def complaint(error: Exception, revision: str | None) -> str:
    """Why the hub gave nothing, and what would help: of anything that huggingface_hub raises, 0.36 and 2.x alike."""
    from huggingface_hub import errors

    asked = error
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        asked = error.__cause__  # what kept it from asking the hub, so that it looked into the cache
    status = getattr(getattr(asked, "response", None), "status_code", None)
    if isinstance(asked, errors.HFValidationError):
        return f"--model-id (MODEL_ID) is neither a folder nor a hub id: {first_line(asked)}"
    if isinstance(asked, errors.OfflineModeIsEnabled):
        return f"{_not_cached(error)}, and HF_HUB_OFFLINE is set, so the hub is not asked; unset it, or give a local folder"
    if isinstance(asked, errors.GatedRepoError):
        return "it is gated: ask for access on its page, and give a token of the account that has it in HF_TOKEN"
    if isinstance(asked, errors.RepositoryNotFoundError):
        return (
            "the hub shows no such model: see to the spelling of --model-id (MODEL_ID); if it is private, give a token that "
            "may read it in HF_TOKEN"
        )
    if isinstance(asked, errors.RevisionNotFoundError):
        return f"it has no branch, tag or commit {revision!r}: see to --revision (REVISION)"
    if status == 401:
        return "the hub does not know the token: give one that is valid in HF_TOKEN, or none for a public model"
    if status == 403:
        return "the hub forbids it: give a token that may read it in HF_TOKEN"
    if status == 404:
        return f"it holds no {str(asked.response.url).rpartition('/')[2]}"
    if status == 429:
        return "the hub takes no more requests for now: wait, or give a token in HF_TOKEN, which may ask more often"
    if status:
        return f"the hub answers with status {status}: try again later"
    if isinstance(asked, OSError) and asked.filename:
        return (
            f"{asked.filename} cannot be used by user {os.geteuid()} ({asked.strerror}); give that user the folder (chown), "
            "or another one with --huggingface-hub-cache (HF_HUB_CACHE) or HF_HOME"
        )
    why = f"{type(asked).__name__}: {first_line(asked)}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{_not_cached(error)}, and the hub cannot be reached ({why}); see to the network, or give a local folder"
    return why


def _not_cached(error: Exception) -> str:
    return "its copy in the cache is not whole" if hasattr(error, "snapshot_path") else "it is not in the cache"
