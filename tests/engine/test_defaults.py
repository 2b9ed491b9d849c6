"""What is used of a model's generation_config.json, and what the log says of the rest."""

import pytest

from engine.defaults import sampling_defaults
from manifest import Manifest


def defaults(caplog, given, sampled_on="host"):
    """What is used of a generation_config.json, and what the log says."""
    caplog.set_level("INFO")
    used = sampling_defaults(Manifest("llama", 1024, (), generation_config=given), sampled_on)
    return used, [record.getMessage() for record in caplog.records]


def test_sampling_defaults_are_those_of_generation_config(caplog):
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 7, "eos_token_id": 2}
    used, log = defaults(caplog, given)
    assert used == {"temperature": 0.6, "top_p": 0.9}
    values = "temperature 0.6, top_p 0.9"
    unused, line = log
    assert unused == "generation_config.json has max_new_tokens, which is not supported"
    assert line.startswith(f"Sampling defaults on /v1 routes, from generation_config.json: {values} (--generation-config none")


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", 1.5), ("min_p", True), ("repetition_penalty", 0)],
)
def test_a_default_that_cannot_be_used_is_left_out_with_a_warning(caplog, name, value):
    used, log = defaults(caplog, {name: value})
    assert used == {}
    assert log == [f"generation_config.json has {name} {value!r}, which cannot be used"]


def test_a_device_that_samples_gets_the_defaults_that_it_can_do(caplog):
    given = {"temperature": 0.6, "top_k": 1000, "min_p": 0.1, "repetition_penalty": 1.05, "typical_p": 1}
    used, log = defaults(caplog, given, "device")
    assert used == {"temperature": 0.6, "top_k": 256, "typical_p": 1.0}
    assert log == [
        "generation_config.json has min_p 0.1, repetition_penalty 1.05, top_k above 256, which needs --sampling hybrid",
        "Sampling defaults on /v1 routes, from generation_config.json: temperature 0.6, top_k 256, typical_p 1 "
        "(--generation-config none disables them)",
    ]
