"""Hybrid sampling on the real library: one set of graphs gives ids or logits, as each step asks."""

import random
import tempfile
from pathlib import Path

import pytest
from loop import Driven
from msgspec.structs import replace
from test_server import WINDOW, assert_like, cores, refuse_to_compile, serve  # noqa: F401
from test_simulator import VOCABULARY, reference  # noqa: F401
from transformers_neuronx import compiler

from config import Config
from manifest import Manifest
from models.neuron import compile as verb
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel
from protocol import Generate, SamplingParams

HOST_ONLY = [
    {"sampling": SamplingParams(seed=5, temperature=1.5, is_seed_given=True)},
    {"sampling": SamplingParams(repetition_penalty=1.3)},
    {"sampling": SamplingParams(logit_bias=[(7, 100.0)])},
    {"sampling": SamplingParams(seed=6, min_p=0.2, temperature=2.0)},
    {"logprobs": True, "top_n_tokens": 3},
    {"min_new_tokens": 4},
]
DEVICE = [{}, {}, {"sampling": SamplingParams(seed=8, temperature=1.2, top_k=20)}]


def mixed_requests():
    chance = random.Random(3)
    for n in range(18):
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.choice((1, 3, 9, 20, 33)))]
        wanted = {"logprobs": False} | (HOST_ONLY[n // 3] if n % 3 == 0 else DEVICE[n % 3])
        yield Generate(n, prompt, chance.randrange(2, WINDOW - len(prompt)), ignore_eos=True, **wanted)


def answers(model, requests):
    """Their tokens, and how many calls gave ids and logits."""
    driven, chance, taken = Driven(served=model), random.Random(4), {True: 0, False: 0}
    forward = model.forward

    def counted(chunks):
        taken[model._returns_ids] += 1
        return forward(chunks)

    model.forward = counted
    for request in requests:
        driven.arrive(request)
        for _ in range(chance.randrange(5)):
            if not driven.is_idle or driven.wire.arrivals:
                driven.step()
    driven.run()
    return driven.tokens, taken


@pytest.mark.parametrize("prefill_chunk", [8, 0], ids=["chunks", "whole"])
@pytest.mark.parametrize("tp_degree", [1, 2])
def test_every_request_gets_what_it_asks_for_beside_any_other(reference, tmp_path, tp_degree, prefill_chunk):  # noqa: F811
    made, requests = reference("llama, grouped"), list(mixed_requests())
    settings = {"max_batch_size": 3, "tp_degree": tp_degree, "prefill_chunk": prefill_chunk, "position_buckets": (16,)}
    hybrid, taken = answers(serve(made, tmp_path, sampling="hybrid", **settings), requests)
    host, _ = answers(serve(made, tmp_path, sampling="host", **settings), requests)
    assert taken[True] > 10 and taken[False] > 10
    drawn = 0
    for request in requests:
        if request.sampling == SamplingParams() and not request.min_new_tokens:
            assert_like(made, request.prompt, [*request.prompt, *hybrid[request.id]])
        if request.sampling.seed is None or request.sampling.is_seed_given:
            assert hybrid[request.id] == host[request.id]
        else:
            drawn += hybrid[request.id] != made.greedy(request.prompt, request.max_new_tokens)
    assert drawn > 2


def test_a_hybrid_model_is_compiled_once_for_both_and_served_from_its_folder(reference, tmp_path, monkeypatch):  # noqa: F811
    made, programs = reference("llama, grouped"), {}
    for sampling in ("hybrid", "device"):
        output = tmp_path / sampling
        words = [
            "--model-id",
            made.folder,
            "--output",
            output,
            "--tp-degree",
            "2",
            "--dtype",
            "float32",
            "--sampling",
            sampling,
        ]
        assert verb.main([*map(str, words), "--max-total-tokens", str(WINDOW), "--max-batch-size", "3"]) == 0
        programs[sampling] = len(list(output.glob("compiled/*.neff")))
    assert programs["hybrid"] == programs["device"]
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    output = tmp_path / "hybrid"
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron"), output, Manifest.read(output))
    requests = [replace(request, logprobs=request.id % 2 == 0) for request in mixed_requests() if request.id % 3 == 1]
    tokens, taken = answers(NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path))), requests)
    assert all(taken.values())
    for request in requests:
        assert_like(made, request.prompt, [*request.prompt, *tokens[request.id]])
