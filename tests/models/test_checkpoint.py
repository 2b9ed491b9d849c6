"""Which values of a checkpoint's config.json are served on Neuron: those that the library computes.

`neuron_sim/test_checkpoints.py` shows on the library itself that it computes other values wrongly.
"""

from __future__ import annotations

import pytest

from models.base import ModelError
from models.checkpoint import COMPUTED, check_values

FIELDS = [(family, field) for family, fields in COMPUTED.items() for field in fields]
OTHER = {bool: lambda value: not value, float: lambda value: 10 * value, str: lambda value: "something else"}


def value_of(field, value):
    """As config.json has it."""
    objects = {"rope_scaling": "rope_type", "quantization_config": "quant_method"}
    return {objects[field]: value} if field in objects else value


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_a_value_that_the_library_does_not_compute_is_refused_by_its_name(family, field):
    computed = COMPUTED[family][field]
    other = OTHER[type(computed[0])](computed[0])
    with pytest.raises(ModelError) as refused:
        check_values({field: value_of(field, other)}, family)
    message = str(refused.value)
    assert message.startswith(f"config.json: {field} is {other} and transformers-neuronx computes {computed[0]}")
    assert f" for {family} models, so its text would be wrong" in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_what_the_library_computes_is_accepted_and_so_is_no_value(family, field):
    for value in (*COMPUTED[family][field], None):
        check_values({field: value and value_of(field, value)}, family)
    check_values({}, family)


def test_the_older_name_of_a_scaled_rotary_base_counts():
    check_values({"rope_scaling": {"type": "llama3"}}, "llama")
    with pytest.raises(ModelError, match="rope_scaling is llama3 and transformers-neuronx computes default for mistral"):
        check_values({"rope_scaling": {"type": "llama3"}}, "mistral")
