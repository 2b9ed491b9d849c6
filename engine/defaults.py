"""Sampling defaults of requests on /v1 routes, from the model's generation_config.json."""

from __future__ import annotations

import logging
from typing import Any

from config import DEVICE_TOP_K
from manifest import Manifest, whole
from protocol import SAMPLING_PARAMETERS, SamplingParameter

logger = logging.getLogger("worker")


def sampling_defaults(manifest: Manifest, sampled_on: str) -> dict[str, int | float]:
    """Returns the sampling parameters of generation_config.json that can be used, by their names. The log
    lists them, and the fields that cannot be used.

    sampled_on: "host", "hybrid" or "device". With "device", the result has no defaults that the device does
    not support, and a `top_k` of at most DEVICE_TOP_K: other requests would be rejected.
    """
    used = {}
    host_only = []
    for name, parameter in SAMPLING_PARAMETERS.items():
        given = manifest.generation_config.get(name)
        if given is None:
            continue
        value = _value(parameter, given)
        if value is None:
            logger.warning("generation_config.json has %s %r, which cannot be used", name, given)
        elif sampled_on == "device" and not parameter.on_device and value != parameter.neutral:
            host_only.append(f"{name} {value:g}")
        else:
            used[name] = value
    if sampled_on == "device" and used.get("top_k", 0) > DEVICE_TOP_K:
        host_only.append(f"top_k above {DEVICE_TOP_K}")
        used["top_k"] = DEVICE_TOP_K
    if host_only:
        unsupported = ", ".join(host_only)
        logger.warning("generation_config.json has %s, which needs --sampling hybrid", unsupported)
    if unused := manifest.unused:
        logger.warning("generation_config.json has %s, which is not supported", ", ".join(unused))
    if used:
        values = ", ".join(f"{name} {value:g}" for name, value in used.items())
        logger.info(
            "Sampling defaults on /v1 routes, from generation_config.json: %s "
            "(--generation-config none disables them)",
            values,
        )
    return used


def _value(parameter: SamplingParameter, given: Any) -> int | float | None:
    """Returns the value in the type of its parameter; None if it is no number, not within the parameter's
    limits, 2 ** 31 or more, or a fraction where the parameter is a whole number."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not parameter.allows(given) or abs(given) >= 2**31:
        return None
    return whole(given) if isinstance(parameter.neutral, int) else float(given)
