"""The host's Neuron driver and this image's runtime library: compared before anything is loaded.

Where they do not fit, nrt_init() fails after the weights were downloaded and read, without the reason.

    python3 -m models.neuron.driver     prints both versions as JSON; exit code 2 if they do not fit

Source: aws-neuron-sdk of 21 August 2026 (SDK 2.32), release-notes/components/runtime.rst:329 and :435."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import NamedTuple

from models.machine import read_text
from run import ConfigError

logger = logging.getLogger("model")

DRIVER = Path("/sys/module/neuron/version")  # containers see the host's
PACKAGES = Path("/var/lib/dpkg/status")
RUNTIME_VERSION = re.compile(r"^Package: aws-neuronx-runtime-lib\n(?:.+\n)*?Version: (.+)", re.MULTILINE)

HOST = "the host has driver 2.28 (aws-neuronx-dkms=2.28.*, or an AMI of SDK 2.30 or older)"
NEWER_RUNTIME = 'the image a newer runtime library (make image ARGS="--build-arg NEURON_RUNTIME=2.33")'
OLDER_RUNTIME = "the image its own runtime library (make image without NEURON_RUNTIME)"

NEWEST_DRIVER = (2, 30)  # of SDK 2.32


class Versions(NamedTuple):
    """The versions of the host's Neuron driver and of this image's runtime library; None: it cannot be
    read."""

    driver: str | None
    runtime: str | None

    @classmethod
    def read(cls) -> Versions:
        """Reads the driver's version from the kernel, and the library's from the list of installed packages.
        Raises nothing."""
        package = RUNTIME_VERSION.search(read_text(PACKAGES))
        return cls(read_text(DRIVER) or None, package[1] if package else None)

    def __str__(self) -> str:
        return f"Neuron driver {self.driver or 'unknown'} with runtime library {self.runtime or 'unknown'}"

    def check(self) -> None:
        """Raises ConfigError, with the versions that work, for a pair that is known to fail: driver 2.29 with
        a library older than 2.33, or a driver older than 2.27 with library 2.32. The notes do not say whether
        later drivers and libraries fail in these pairs: a warning says that they may. Also warns of a driver
        newer than NEWEST_DRIVER, and of an unknown version, with which nothing is compared."""
        driver = _release(self.driver)
        runtime = _release(self.runtime)
        if not driver or not runtime:
            logger.warning("%s: whether they fit is not checked", self)
            return
        needs_newer = driver >= (2, 29) and runtime < (2, 33)
        needs_older = driver < (2, 27) and runtime >= (2, 32)
        remedy = f"they work where {HOST}, or {NEWER_RUNTIME if needs_newer else OLDER_RUNTIME}"
        if (needs_newer and driver == (2, 29)) or (needs_older and runtime == (2, 32)):
            raise ConfigError(f"{self} fails in nrt_init(); {remedy}")
        if needs_newer or needs_older:
            logger.warning("%s may fail in nrt_init(); if so, %s", self, remedy)
        elif driver > NEWEST_DRIVER:
            logger.warning("%s: the driver is newer than those that this server knows", self)


def _release(version: str | None) -> tuple[int, int] | None:
    """Returns the first two numbers of a version: (2, 28) of "2.28.1". None: the version is unknown, or
    begins otherwise."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def main() -> int:
    """Prints both versions as JSON, and on stderr why they do not fit. Returns the exit code: 2 if they are
    known not to fit, else 0."""
    versions = Versions.read()
    print(json.dumps(versions._asdict()))
    try:
        versions.check()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
