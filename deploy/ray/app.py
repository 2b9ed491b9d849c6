"""Ray Serve: each replica runs this server, unchanged, as a child process, and passes requests on to it.

    serve run deploy.ray.app:app [NAME=VALUE ...]

Owns the Serve application: its arguments, what Ray is asked for, and the life of a replica. A NAME is one of
`OWN_ARGUMENTS`, or a flag of the server without its dashes (model-id=org/model). What is not given comes from
the environment of Ray's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import aiohttp
import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deploy.ray.proxy import Proxy
from deploy.ray.server import Server

# With their defaults; each is an environment variable too (MIN_REPLICAS). `cpus` is a replica's share, which
# may be a fraction.
OWN_ARGUMENTS = {"min-replicas": "1", "max-replicas": "2", "cpus": "1"}
DEFAULTS = {
    "max-batch-size": "4",
    "graceful-termination-timeout": "25",
    "payload-limit": "32000000",
    "client-timeout": "75",
}
TARGET_LOAD = (
    0.75  # of the slots of a replica, in running requests, beyond which there should be another replica
)
MANY_REQUESTS = (
    10_000  # more than any server admits: the server answers an overload with its own 429, not Ray with a 503
)
REGISTER_S = 1.0
FORGET_S = 5.0


@serve.deployment(
    ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000, logging_config={"enable_access_log": False}
)
class Directory:
    """The addresses of the servers that take requests, by the replicas that say so every REGISTER_S."""

    def __init__(self):
        self._seen_at: dict[str, float] = {}

    async def register(self, address: str) -> list[str]:
        """Adds an address; returns all that were heard of in the last FORGET_S."""
        self._seen_at[address] = time.monotonic()
        oldest = time.monotonic() - FORGET_S
        self._seen_at = {address: seen_at for address, seen_at in self._seen_at.items() if seen_at > oldest}
        return list(self._seen_at)

    async def remove(self, address: str) -> None:
        self._seen_at.pop(address, None)


@serve.deployment(
    max_ongoing_requests=MANY_REQUESTS,
    health_check_period_s=1,
    health_check_timeout_s=10,
)
@serve.ingress()
class TextGeneration:
    """A replica. Ray routes requests to it when its server is ready, and replaces it when the server's health
    fails."""

    async def __init__(self, directory: DeploymentHandle, arguments: dict[str, str]):
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        self._directory = directory
        self._addresses: list[str] = []
        limits = {"limit": 0, "keepalive_timeout": 15}  # shorter than the server's own
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(**limits),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2),
            auto_decompress=False,
        )
        grace_s = float(_setting(arguments, "graceful-termination-timeout"))
        self._server = Server(ray.util.get_node_ip_address(), flags, grace_s)
        await self._server.wait_ready(self._session)
        self._proxy = Proxy(
            self._session,
            self._server.address,
            lambda: self._addresses,
            int(_setting(arguments, "payload-limit")),
            float(_setting(arguments, "client-timeout")),
        )
        self._registering = asyncio.create_task(self._register())

    def __serve_build_asgi_app__(self) -> Proxy:
        return self._proxy

    async def check_health(self) -> None:
        """Ray's; three failures, and it replaces the replica."""
        try:
            await self._server.check(self._session)
        except Exception:
            self._proxy.is_healthy = False
            raise
        self._proxy.is_healthy = True

    async def _register(self) -> None:
        """Keeps this server in the directory, and the list of the others up to date, for as long as the
        server runs."""
        while self._server.is_running:
            with contextlib.suppress(Exception):  # a directory that Ray replaces is asked again
                self._addresses = await self._directory.register.remote(self._server.address)
            await asyncio.sleep(REGISTER_S)
        await self._directory.remove.remote(self._server.address)

    async def __del__(self) -> None:
        """Ray calls this once the requests that it routed here have ended; other replicas may still have some
        here."""
        self._registering.cancel()
        with contextlib.suppress(Exception):
            await self._directory.remove.remote(self._server.address)
            await asyncio.sleep(REGISTER_S)  # until the others know
        await self._server.stop()
        await self._session.close()


def app(arguments: dict[str, str]) -> Application:
    """The Serve application. Unknown arguments become flags, which the server checks."""
    arguments = {name.replace("_", "-").lower(): str(value) for name, value in arguments.items()}
    cpus = float(_setting(arguments, "cpus"))
    neuron_cores = int(_setting(arguments, "tp-degree") or 0)
    slots = int(_setting(arguments, "max-batch-size"))
    autoscaling = {
        "min_replicas": int(_setting(arguments, "min-replicas")),
        "max_replicas": int(_setting(arguments, "max-replicas")),
        "target_ongoing_requests": TARGET_LOAD * slots,
        "upscale_delay_s": 10,
    }
    resources = {"neuron_cores": neuron_cores} if neuron_cores else {}
    grace_s = float(_setting(arguments, "graceful-termination-timeout"))
    flags = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
    if not _setting(arguments, "threads"):
        flags["threads"] = str(max(1, int(cpus)))
    return TextGeneration.options(
        autoscaling_config=autoscaling,
        ray_actor_options={"num_cpus": cpus, "resources": resources},
        graceful_shutdown_timeout_s=2 * grace_s
        + 20,  # for the requests that Ray routed here, then for those of other replicas
    ).bind(Directory.bind(), flags)


def _setting(arguments: dict[str, str], name: str) -> str | None:
    """An argument, else its environment variable, else its default here."""
    given = arguments.get(name) or os.environ.get(name.upper().replace("-", "_"))
    return given or OWN_ARGUMENTS.get(name) or DEFAULTS.get(name)
