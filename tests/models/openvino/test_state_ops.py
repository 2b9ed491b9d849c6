"""Models with recurrent states on OpenVINO: in any schedule a request generates to the last bit what it generates alone, with
snapshots between messages, copies of prefixes, draft tokens and cancels; freed states are no state of anyone. And the delta
rule of tiles is that of single tokens."""

from random import Random
from unittest import mock

import numpy as np
import openvino as ov
import pytest
import transformers
from loop import Driven, NoMetrics, Oracle
from msgspec.structs import replace
from tiny_models import made_checkpoint, settings

import models
import worker
from manifest import Manifest
from models.base import Chunk
from models.cache import read_entry
from models.openvino import OpenVino
from models.openvino import model as openvino_model
from models.openvino.delta_tiles import TILE, delta_rule_of_tiles
from protocol import Cancel, Generate

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("conversions"), pytest.mark.filterwarnings("ignore")]

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "linear attention": transformers.Qwen3_5TextConfig(
        **SIZES | HEADS,
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
    ),
    "short convolutions": transformers.Lfm2Config(
        **SIZES | HEADS, num_hidden_layers=3, conv_L_cache=3, full_attn_idxs=[1], block_auto_adjust_ff_dim=False
    ),
    "state spaces": transformers.BambaConfig(
        **SIZES | HEADS,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_expand=2,
        mamba_chunk_size=32,
    ),
}


IN_TILES = "linear attention, prompts in tiles"


@pytest.fixture(params=[*CONFIGS, IN_TILES])
def served(request, monkeypatch):
    """The conversion chooses tiles by time."""
    tiles = request.param == IN_TILES
    monkeypatch.setattr(openvino_model, "read_entry", lambda entry: read_entry(entry) | {"tiles": tiles})
    folder = made_checkpoint(CONFIGS["linear attention" if tiles else request.param])
    config = settings(folder, 256, max_batch_size=3, prefix_slots=5, max_snapshot_memory=0.0004)
    model = models.load(OpenVino(config, folder, Manifest.read(folder)), lambda phase: None)
    assert model.engine == "openvino" and 0 < model.states.snapshots < 300
    assert model.chunk_granularity == model.prefix_granularity == (TILE if tiles else 1)
    return model


def poison(model):
    """Whoever reads a state that is nobody's gets no numbers."""
    for table in model._tables.values():
        assert not table[0].any(), "new sequences begin with zeros"
        table[list(model.states.unused)] = np.nan


def conversations(chance, system):
    """Three, which begin with the same tokens."""
    requests = []
    for number in range(3):
        text = list(system)
        for turn in range(chance.randint(1, 3)):
            before = len(text)
            text += chance.choices(range(20, 90), k=chance.randint(2, 12))
            made = Generate(10 * number + turn, [*text, 5, 6], chance.randint(1, 10))
            requests.append(replace(made, borders=[len(system), before, len(text)]))
            text += chance.choices(range(20, 90), k=chance.randint(2, 6))
    return requests


def test_random_schedules_generate_what_each_request_generates_alone(served):
    accepted = held = 0
    for seed in range(20):
        chance = Random(seed)
        requests = conversations(chance, [*range(1, 14)] * (6 if served.chunk_granularity == TILE else 1))
        texts = {}
        for request in requests:
            alone = Driven(served=served, metrics=NoMetrics())
            alone.arrive(replace(request, borders=[]))
            alone.run()
            texts[request.id] = alone.tokens[request.id]
        arriving = list(requests)
        proposers = (Oracle(texts[request.id], chance) for request in requests)
        driven = Driven(served=served)
        with mock.patch.object(worker, "NgramProposer", lambda *_, made=proposers: next(made)):
            while arriving:
                for _ in range(min(len(arriving), chance.choice([0, 0, 1, 3]))):
                    driven.arrive(arriving.pop(0))
                if chance.random() < 0.1:
                    driven.arrive(Cancel(chance.choice(requests).id, "test"))
                driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
                poison(served)
                driven.step()
            driven.run()
        for request in requests:
            found = driven.tokens[request.id]
            assert found == texts[request.id][: len(found)], f"seed {seed}: {request}"
            assert driven.ends[request.id] == "cancelled" or found == texts[request.id], f"seed {seed}: {request}"
        accepted += driven.worker.metrics.series("speculation_accepted_tokens")._value.get()
        held += sum(prompt.cached for prompt in driven.prompts.values())
    assert accepted > 20 and held > 200


def test_a_prompt_is_in_other_chunks_and_beside_another_what_it_is_whole(served):
    ids = Random(0).choices(range(VOCABULARY), k=130)
    whole = served.forward([Chunk(0, ids, 0, all_logits=True)])
    for begin in (1, 2, 63, 64, 65, 128):
        if begin % served.chunk_granularity:
            continue
        poison(served)
        parts = [Chunk(1, ids[:begin], 0, all_logits=True), Chunk(2, ids[7:90], 0)]
        first = served.forward(parts)[:begin]
        rest = served.forward([Chunk(1, ids[begin:], begin, all_logits=True)])
        assert np.array_equal(first[begin > 1 or 1 :], whole[:begin][begin > 1 or 1 :])
        assert np.array_equal(rest, whole[begin:])


def test_a_prompt_of_any_length_is_beside_others_what_it_is_alone(served):
    ids = Random(0).choices(range(VOCABULARY), k=130)
    for length in (*range(1, 6), 31, *range(60, 68), *range(126, 131)):
        poison(served)
        alone = served.forward([Chunk(0, ids[:length], 0, all_logits=True)])
        step = served.forward([Chunk(0, [3], length)])
        served.forward([Chunk(0, ids[:length], 0)])
        poison(served)
        chunks = [Chunk(2, ids[5:17], 0), Chunk(0, [3], length), Chunk(1, ids[:length], 0, all_logits=True)]
        beside = served.forward(chunks)
        assert np.array_equal(beside[2:], alone) and np.array_equal(beside[1:2], step)


def test_a_prompt_of_any_length_is_scored_beside_others(served):
    ids = Random(0).choices(range(5, VOCABULARY), k=130)
    driven = Driven(served=served, metrics=NoMetrics())
    driven.arrive(Generate(0, ids[:5], 200, ignore_eos=True))
    for length in (1, 2, 3, 63, 64, 65, 66, 128, 129, 130):
        plain = Generate(2 * length, ids[:length], 2, ignore_eos=True)
        scored = replace(plain, id=plain.id + 1, prompt_logprobs=True)
        driven.arrive(plain, scored)
        for _ in range(20):
            driven.step()
            if {plain.id, scored.id} <= set(driven.ends):
                break
        assert len(driven.prompts[scored.id].scores) == length - 1
        assert len(driven.tokens[scored.id]) == 2 and driven.tokens[scored.id] == driven.tokens[plain.id]
    driven.run()


HEADS_OF_TILES, KEY_SIZE, VALUE_SIZE = 3, 16, 8
LAYER = {"heads": HEADS_OF_TILES, "key_size": KEY_SIZE, "value_size": VALUE_SIZE}


@pytest.fixture(scope="module")
def tiles():
    """Computes results and next states of tiles."""
    widths = [KEY_SIZE, KEY_SIZE, VALUE_SIZE, 1, 1]
    shapes = [[-1, TILE, HEADS_OF_TILES * width] for width in widths] + [[-1, HEADS_OF_TILES, VALUE_SIZE, KEY_SIZE]]
    inputs = [ov.opset13.parameter(ov.PartialShape(shape), np.float32) for shape in shapes]
    graph = ov.Model(list(delta_rule_of_tiles(LAYER, inputs[:5], inputs[5])), inputs)
    compiled = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda *arrays: compiled(arrays).to_tuple()


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("random", 3e-6),
        ("equal keys that nothing decays", 3e-6),
        ("states that decay at once", 5e-5),  # the sums of their gates are large, as those of transformers are
        ("padding", 3e-6),
    ],
)
def test_a_tile_computes_what_its_tokens_compute_one_after_the_other(tiles, kind, tolerance):
    random = np.random.default_rng(0)
    count = 2
    query, key = random.standard_normal((2, count, TILE, HEADS_OF_TILES, KEY_SIZE)).astype(np.float32)
    value = random.standard_normal((count, TILE, HEADS_OF_TILES, VALUE_SIZE)).astype(np.float32)
    gate = -random.random((count, TILE, HEADS_OF_TILES)).astype(np.float32)
    beta = random.random((count, TILE, HEADS_OF_TILES)).astype(np.float32)
    states = random.standard_normal((count, HEADS_OF_TILES, VALUE_SIZE, KEY_SIZE)).astype(np.float32)
    if kind.startswith("equal"):
        key[:] = key[:, :1]
        gate[:] = 0
        beta[:] = 1
    elif kind.startswith("states"):
        gate *= 100
    elif kind == "padding":
        for each in (query, key, value, gate, beta):
            each[:, 5:] = 0
    flat = [each.reshape(count, TILE, -1) for each in (query, key, value, gate, beta)]
    found, next_states = tiles(*flat, states)
    norms = [np.sqrt((each.astype(float) ** 2).sum(-1, keepdims=True) + 1e-6) for each in (query, key)]
    query, key = query / norms[0] / KEY_SIZE**0.5, key / norms[1]
    state = states.astype(float)
    results = []
    for n in range(TILE):
        state = state * np.exp(gate[:, n, :, None, None])
        missing = (value[:, n] - (state @ key[:, n, ..., None])[..., 0]) * beta[:, n, :, None]
        state = state + missing[..., None] * key[:, n, :, None]
        results.append((state @ query[:, n, ..., None])[..., 0])
    expected = np.stack(results, 1).reshape(count * TILE, -1)
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    assert np.abs(next_states - state).max() < tolerance * np.abs(states).max()
