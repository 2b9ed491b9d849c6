"""The server as a child process of a replica: `entrypoint.sh serve`, started, checked and stopped as in a
container.

Owns the process, its address and its log. Knows nothing of Ray, nor of the requests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp

ENTRYPOINT = Path(__file__).resolve().parents[2] / "entrypoint.sh"
POLL_S = 0.1
STOP_MARGIN_S = 10.0  # of entrypoint.sh beyond the time that running requests have


class ServerError(Exception):
    """The server has ended, or cannot take requests."""


class Server:
    """A server on a free port of `host`. `flags` are its command line; what they leave open comes from the
    environment."""

    def __init__(self, host: str, flags: list[str], grace_s: float):
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._grace_s = grace_s
        self._last_line = ""
        # The kernel ends the server when this process dies, so that a killed replica leaves its device to the
        # next one.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            str(ENTRYPOINT),
            "serve",
            *flags,
            "--hostname",
            host,
            "--port",
            str(port),
        ]
        environment = {"PYTHON": sys.executable} | os.environ
        environment.pop("SAGEMAKER_BIND_TO_PORT", None)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
            start_new_session=True,
        )
        self._log = threading.Thread(target=self._copy_log, daemon=True)
        self._log.start()

    def _copy_log(self) -> None:
        for line in self._process.stderr:
            self._last_line = line.strip()
            sys.stderr.write(line)
            sys.stderr.flush()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Returns when requests are accepted, which takes as long as loading or compiling the model. Raises
        ServerError."""
        while True:
            try:
                return await self.check(session)
            except (ServerError, aiohttp.ClientError):
                if not self.is_running:
                    raise
            await asyncio.sleep(POLL_S)

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Raises ServerError unless `/health` says that requests are accepted."""
        if not self.is_running:
            self._log.join(1)  # its last line is the reason
            raise ServerError(f"the server has ended with code {self._process.returncode}: {self._last_line}")
        async with session.get(f"http://{self.address}/health") as response:
            if response.status != 200:
                raise ServerError(f"the server is not ready: {await response.text()}")

    async def stop(self) -> None:
        """Lets running requests finish, as long as --graceful-termination-timeout allows; then nothing of it
        is left."""
        deadline = asyncio.get_running_loop().time() + self._grace_s + STOP_MARGIN_S
        self._process.terminate()
        while self.is_running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
