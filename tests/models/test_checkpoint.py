"""Which values of a checkpoint's config.json are served on Neuron: those that the library computes.

`neuron_sim/test_checkpoints.py` shows on the library itself that it computes other values wrongly.
"""

from __future__ import annotations

import pytest

from models.base import ModelError
from models.checkpoint import COMPUTED, check_values, legacy_config

FIELDS = [(family, field) for family, fields in COMPUTED.items() for field in fields]
OTHER = {bool: lambda value: not value, float: lambda value: 10 * value, str: lambda value: "something else"}


def value_of(field, value):
    """As config.json has it."""
    return {"rope_type": value} if field == "rope_scaling" else value


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_a_value_that_the_library_does_not_compute_is_refused_by_its_name(family, field):
    computed = COMPUTED[family][field]
    other = OTHER[type(computed[0])](computed[0])
    with pytest.raises(ModelError) as refused:
        check_values({"hidden_size": 64, field: value_of(field, other)}, family)
    message = str(refused.value)
    assert message.startswith(f"config.json: {field} is {other} and transformers-neuronx computes {computed[0]}")
    assert f" for {family} models, so its text would be wrong" in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_what_the_library_computes_is_accepted_and_so_is_no_value(family, field):
    for value in (*COMPUTED[family][field], None):
        check_values({"hidden_size": 64, field: value and value_of(field, value)}, family)
    check_values({}, family)


def test_the_older_name_of_a_scaled_rotary_base_counts():
    check_values({"rope_scaling": {"type": "llama3"}}, "llama")
    with pytest.raises(ModelError, match="rope_scaling is llama3 and transformers-neuronx computes default for mistral"):
        check_values({"rope_scaling": {"type": "llama3"}}, "mistral")


def test_opt_with_embeddings_of_another_width_is_refused():
    check_values({"hidden_size": 64, "word_embed_proj_dim": 64}, "opt")
    with pytest.raises(ModelError, match="word_embed_proj_dim is 32 and transformers-neuronx computes hidden_size"):
        check_values({"hidden_size": 64, "word_embed_proj_dim": 32}, "opt")


@pytest.mark.parametrize("family", COMPUTED)
def test_a_quantized_checkpoint_is_refused_whose_scales_the_library_would_ignore(family):
    with pytest.raises(ModelError, match="quantization_config is fp8 and transformers-neuronx computes none"):
        check_values({"quantization_config": {"quant_method": "fp8", "bits": 8}}, family)


def test_gpt_neox_of_transformers_5_keeps_its_rotary_dimensions_and_their_base():
    rope = {"rope_theta": 500000, "partial_rotary_factor": 1.0, "rope_type": "default"}
    legacy = legacy_config({"model_type": "gpt_neox", "rope_parameters": rope})
    assert (legacy["rotary_emb_base"], legacy["rotary_pct"]) == (500000, 1.0)
