"""Models with recurrent states in plain PyTorch: their logits are those of transformers' whole forward, whatever ran in a slot
before and runs beside it, and a request generates alone and in any schedule the same tokens; nobody reads a freed state.
"""

import functools
from random import Random

import numpy as np
import pytest
import torch
import transformers
from loop import Driven, NoMetrics
from msgspec.structs import replace
from tiny_models import made_checkpoint, settings

from models.base import Chunk
from models.checkpoint.pretrained import load_pretrained, reference_logits
from models.pytorch.model import TorchModel
from protocol import Cancel, Generate

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3}
HEADS = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
HYBRID = SIZES | HEADS
LINEAR = HYBRID | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32}
CONFIGS = {
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**LINEAR, head_dim=32),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(**LINEAR | EXPERTS, head_dim=32),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**LINEAR | EXPERTS, head_dim=32),
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(**LINEAR, pad_token_id=0),
    "lfm2": lambda: transformers.Lfm2Config(**HYBRID, full_attn_idxs=[1], block_auto_adjust_ff_dim=False),
    "lfm2-moe": lambda: transformers.Lfm2MoeConfig(
        **HYBRID, **EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"]
    ),
    "granite-4": lambda: transformers.GraniteMoeHybridConfig(
        **HYBRID,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        logits_scaling=3.0,
    ),
    "bamba": lambda: transformers.BambaConfig(**HYBRID, **MAMBA, attn_layer_indices=[1]),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **HYBRID, **MAMBA, head_dim=16, mamba_d_ssm=128, ssm_out_multiplier=0.5, key_multiplier=0.7
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **HYBRID,
        head_dim=16,
        layers_block_type=["mamba", "mlp", "attention", "moe", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "mamba-2": lambda: transformers.Mamba2Config(**SIZES, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=32),
    "jamba": lambda: transformers.JambaConfig(
        **HYBRID, attn_layer_period=3, attn_layer_offset=1, num_experts=4, mamba_d_state=16, mamba_dt_rank=8
    ),
    "mamba": lambda: transformers.MambaConfig(**SIZES, state_size=16, time_step_rank=8),
    "falcon-mamba": lambda: transformers.FalconMambaConfig(**SIZES, state_size=16, time_step_rank=8),
}
MECHANISMS = ("qwen3.5", "lfm2", "bamba", "mamba")
IDS = Random(0).choices(range(VOCABULARY), k=300)


@functools.cache
def served(family: str, dtype: str = "float32") -> TorchModel:
    folder = made_checkpoint(CONFIGS[family](), spread=0.15)
    config = settings(folder, 300, max_batch_size=3, dtype=dtype, max_snapshot_memory=0.0004)
    return TorchModel(config, folder, "cpu")


@functools.cache
def expected(family: str) -> np.ndarray:
    folder = made_checkpoint(CONFIGS[family](), spread=0.15)
    return reference_logits(load_pretrained(settings(folder, 300), folder, "cpu"), IDS)


def differs(family: str, found: np.ndarray, begin: int) -> float:
    wanted = expected(family)
    return np.abs(found - wanted[begin : begin + len(found)]).max() / np.abs(wanted).max()


@torch.inference_mode()
def poison(model):
    """Whoever reads a state that is nobody's gets no numbers."""
    for _, table in model._tables:
        assert not table[0].any(), "new sequences begin with zeros"
        table[list(model.states.unused)] = np.nan


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers_without_a_cache_alone_and_beside_others(family):
    model = served(family)
    model.forward([Chunk(0, IDS[:20], 0)])
    begin = 20  # of the neighbour's next token
    for length in (1, 2, 3, 4, 17, 32, 33, 63, 64, 65, 70):
        poison(model)
        prompt = model.forward([Chunk(1 + length % 2, IDS[:length], 0, all_logits=True)])
        assert differs(family, prompt, 0) < 2e-5  # 1.4e-5 on some processors
        for position in range(length, length + 2):
            poison(model)
            own, neighbour = Chunk(1 + length % 2, [IDS[position]], position), Chunk(0, [IDS[begin]], begin)
            rows = model.forward([neighbour, own])
            assert differs(family, rows[:1], begin) < 2e-5
            assert differs(family, rows[1:], position) < 2e-5
            begin += 1
    chunks = [(0, 2), (2, 40), (40, 41), (41, 104), (104, 232)]
    found = [model.forward([Chunk(1, IDS[begin:end], begin, all_logits=True)]) for begin, end in chunks]
    assert differs(family, np.concatenate(found), 0) < 5e-5  # transformers' own error there is 2e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prompt_goes_on_from_a_snapshot_in_another_slot_to_the_last_bit(family):
    model = served(family)
    model.forward([Chunk(0, IDS[:128], 0, keep="border")])
    whole = model.forward([Chunk(0, IDS[128:200], 128, all_logits=True)])
    assert model.states.reusable(0, 199) == 128
    model.states.resume(0, 2, 128)
    model.copy_prefix(0, 2, 128)
    model.forward([Chunk(0, [7], 0)])
    poison(model)
    assert np.array_equal(model.forward([Chunk(2, IDS[128:200], 128, all_logits=True)]), whole)


@pytest.mark.parametrize("family", MECHANISMS)
def test_random_schedules_generate_what_each_request_generates_alone(monkeypatch, family):
    model, held = served(family), 0
    monkeypatch.setattr(model, "prefill_chunk", 8)
    monkeypatch.setattr(model, "prefix_granularity", 8)
    for seed in range(10):
        chance = Random(seed)
        requests = conversations(chance)
        texts = {}
        for request in requests:
            alone = Driven(served=model, metrics=NoMetrics())
            alone.arrive(replace(request, borders=[]))
            alone.run()
            texts[request.id] = alone.tokens[request.id]
        arriving = list(requests)
        driven = Driven(served=model, metrics=NoMetrics())
        while arriving:
            if chance.random() < 0.3:
                driven.arrive(arriving.pop(0))
            if chance.random() < 0.1:
                driven.arrive(Cancel(chance.choice(requests).id, "test"))
            driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
            poison(model)
            driven.step()
        driven.run()
        for request in requests:
            found = driven.tokens[request.id]
            assert found == texts[request.id][: len(found)], f"seed {seed}: {request}"
            assert driven.ends[request.id] == "cancelled" or found == texts[request.id], f"seed {seed}: {request}"
        held += sum(prompt.cached for prompt in driven.prompts.values())
    assert held > 100


def conversations(chance: Random) -> list[Generate]:
    requests = []
    for number in range(3):
        text = list(range(1, 18))
        for turn in range(chance.randint(1, 3)):
            before = len(text)
            text += chance.choices(range(20, 90), k=chance.randint(1, 20))
            made = Generate(10 * number + turn, [*text, 5, 6], chance.randint(1, 10))
            requests.append(replace(made, borders=[17, before, len(text)]))
    requests.append(Generate(99, [3], 5))
    return requests


def test_a_call_that_failed_costs_its_slot_the_state_and_no_other_slot():
    model = served("mamba")
    for slot in (0, 1):
        model.forward([Chunk(slot, IDS[:10], 0)])
    hook = model._model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.forward([Chunk(0, IDS[10:20], 10)])
    hook.remove()
    with pytest.raises(ValueError, match="slot 0 has no state at position 10"):
        model.forward([Chunk(0, IDS[10:20], 10)])
    assert differs("mamba", model.forward([Chunk(1, IDS[10:20], 10)]), 19) < 1e-5
    assert differs("mamba", model.forward([Chunk(0, IDS[:10], 0)]), 9) < 1e-5


def test_recurrences_stay_in_float32_within_their_memory_and_no_draft_runs():
    model = served("bamba", "bfloat16")
    tables = [table for _, table in model._tables]
    assert {table.dtype for table in tables if table.dim() == 4} == {torch.float32}
    assert {table.dtype for table in tables if table.dim() == 3} == {torch.bfloat16}, "of convolutions: inputs as they are"
    assert model.states.snapshots == 400_000 // model.state_bytes > 0
    assert sum(table.nbytes for table in tables) == model.state_bytes * model.states.count
    assert model.verify_length == model.max_draft_rows == 0
