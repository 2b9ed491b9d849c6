"""A model's defaults on their way: generation_config.json, the worker, a web process, and back to the worker with a request."""

import json

import msgspec
import pytest
from asked import INFO, prepared
from hypothesis import example, given
from hypothesis import strategies as st

from engine.defaults import sampling_defaults
from manifest import Manifest
from protocol import SAMPLING_PARAMETERS, FromWeb, FromWorker, Generate, GenerateOptions, SubmitRequests, encode

NUMBERS = st.one_of(st.integers(-2, 100), st.integers(-2, 100).map(float), st.floats(0, 2), st.sampled_from([None, "1", True]))


def received(message, kind):
    """The message as the other process reads it, which would write the same bytes: all its types are those of the protocol."""
    read = msgspec.msgpack.Decoder(kind).decode(encode(message))
    assert encode(read) == encode(message)
    return read


def announced(generation_config):
    """ModelInfo of a model with this file, as a web process reads it."""
    manifest = Manifest("llama", 120, (), generation_config=json.loads(json.dumps(generation_config)))
    return received(msgspec.structs.replace(INFO, sampling_defaults=sampling_defaults(manifest, "host")), FromWorker)


@pytest.mark.parametrize("api", ["chat", "completion", "responses", "messages"])
@example({"temperature": 0, "top_k": 1})
@given(generation_config=st.fixed_dictionaries({}, optional=dict.fromkeys(SAMPLING_PARAMETERS, NUMBERS)))
def test_the_worker_reads_a_request_with_whatever_generation_config_says(api, generation_config):
    info = announced(generation_config)
    asked = prepared(api, info)
    options = {name: getattr(asked, name) for name in GenerateOptions.__struct_fields__}
    request = received(SubmitRequests([Generate(1, [2], 3, **options)]), FromWeb).generates[0]
    arrived = {name: getattr(request.sampling, name) for name in info.sampling_defaults}
    is_greedy = info.sampling_defaults.get("temperature") == 0

    def expected(name, value):
        parameter = SAMPLING_PARAMETERS[name]
        off = {"temperature": {0: 1.0}, "top_k": {-1: 0}}.get(name, {})
        return parameter.neutral if is_greedy and parameter.is_filter else off.get(value, value)

    assert arrived == {name: expected(name, value) for name, value in info.sampling_defaults.items()}
