"""Models with recurrent states on OpenVINO: in any schedule a request generates to the last bit what it generates alone, with
snapshots between messages, copies of prefixes, draft tokens and cancels; freed states are no state of anyone."""

from random import Random
from unittest import mock

import numpy as np
import pytest
import transformers
from loop import Driven, NoMetrics, Oracle
from msgspec.structs import replace
from tiny_models import made_checkpoint, settings

import models
import worker
from manifest import Manifest
from models.base import Chunk
from models.openvino import OpenVino
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


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request):
    return made_checkpoint(CONFIGS[request.param])


@pytest.fixture
def served(folder):
    config = settings(folder, 256, max_batch_size=3, prefix_slots=5, max_snapshot_memory=0.0004)
    model = models.load(OpenVino(config, folder, Manifest.read(folder)), lambda phase: None)
    assert model.engine == "openvino" and 0 < model.states.snapshots < 300
    return model


def poison(model):
    """Whoever reads a state that is nobody's gets no numbers."""
    for table in model._tables:
        assert not table[0].any(), "new sequences begin with zeros"
        table[list(model.states.unused)] = np.nan


def conversations(chance):
    requests = []
    for number in range(3):
        text = list(range(1, 14))
        for turn in range(chance.randint(1, 3)):
            before = len(text)
            text += chance.choices(range(20, 90), k=chance.randint(2, 12))
            made = Generate(10 * number + turn, [*text, 5, 6], chance.randint(1, 10))
            requests.append(replace(made, borders=[13, before, len(text)]))
            text += chance.choices(range(20, 90), k=chance.randint(2, 6))
    return requests


def test_random_schedules_generate_what_each_request_generates_alone(served):
    accepted = held = 0
    for seed in range(20):
        chance = Random(seed)
        requests = conversations(chance)
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


def test_a_prompt_of_any_length_is_what_it_is_in_other_chunks_and_beside_another(served):
    ids = Random(0).choices(range(VOCABULARY), k=130)
    whole = served.forward([Chunk(0, ids, 0, all_logits=True)])
    for begin in (1, 2, 63, 64, 65, 128):
        poison(served)
        parts = [Chunk(1, ids[:begin], 0, all_logits=True), Chunk(2, ids[7:90], 0)]
        first = served.forward(parts)[:begin]
        rest = served.forward([Chunk(1, ids[begin:], begin, all_logits=True)])
        assert np.array_equal(first[begin > 1 or 1 :], whole[:begin][begin > 1 or 1 :])
        assert np.array_equal(rest, whole[begin:])
