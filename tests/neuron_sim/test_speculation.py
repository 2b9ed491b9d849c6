"""Draft tokens on the real library: outputs are those without, whatever is proposed; one graph verifies all slots."""

import random
import tempfile
from pathlib import Path

import pytest
import torch
from loop import Driven, Oracle
from test_hybrid import mixed_requests
from test_server import WINDOW, assert_like, cores, refuse_to_compile, serve  # noqa: F401
from test_simulator import VOCABULARY, reference  # noqa: F401
from torch_neuronx import simulator
from transformers_neuronx import compiler

import worker
from config import Config
from manifest import Manifest
from models.base import Chunk
from models.neuron import compile as verb
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel
from protocol import Generate, SamplingParams

K = 6
EMBEDDING = torch.nn.functional.embedding


def requests_of(made):
    """Greedy ones and ones with a client's seed, some up to the end of the slot."""
    chance = random.Random(7)
    for n in range(14):
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.choice([1, 2, 5, 9, 17, 30, 40]))]
        most = WINDOW - len(prompt) if n % 3 == 0 else chance.randrange(1, WINDOW - len(prompt))
        sampling = SamplingParams(seed=n, temperature=0.7, is_seed_given=True) if n % 2 else SamplingParams()
        yield Generate(n, prompt, most, ignore_eos=True, logprobs=False, sampling=sampling)


def texts_of(model, requests, known=None, schedule=0, at_most=2000):
    """Their tokens, and how many of them took no step of their own. known: the texts to propose from."""
    chance = random.Random(schedule)
    driven = Driven(served=model)
    oracles = iter(Oracle(known[request.id], chance) if known else None for request in requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "NgramProposer", lambda *_: next(oracles))
        if known is None:
            driven.worker.scheduler.verify_length = 1
        for request in requests:
            driven.arrive(request)
            for _ in range(chance.randrange(4)):
                if not driven.is_idle or driven.wire.arrivals:
                    driven.step()
        driven.run(at_most)
    accepted = sum(token.from_draft for _peer, message in driven.wire.sent for token in getattr(message, "tokens", []))
    return dict(driven.tokens), accepted


@pytest.fixture
def without():
    """Runs requests on a model that could verify draft tokens, without any."""

    def run(model, requests):
        budget, model.max_draft_rows = model.max_draft_rows, 0
        texts, _ = texts_of(model, requests)
        model.max_draft_rows = budget
        return texts

    return run


@pytest.mark.parametrize("sampling", ["host", "hybrid", "device"])
@pytest.mark.parametrize("prefill_chunk", [8, 4, 0], ids=["chunks", "short chunks", "whole"])
@pytest.mark.parametrize("tp_degree", [1, 2])
def test_texts_are_those_without_draft_tokens(reference, without, tmp_path, tp_degree, prefill_chunk, sampling):  # noqa: F811
    made = reference("llama, grouped")
    settings = {"tp_degree": tp_degree, "prefill_chunk": prefill_chunk, "sampling": sampling, "position_buckets": (16,)}
    model = serve(made, tmp_path, max_batch_size=4, speculate=K - 1, **settings)
    assert model.verify_length == K
    requests = [each for each in requests_of(made) if sampling == "host" or each.sampling.seed is None]
    known = without(model, requests)
    for request in requests:
        if request.sampling.seed is None:
            assert_like(made, request.prompt, [*request.prompt, *known[request.id]])
    accepted = 0
    for schedule in range(4):
        texts, more = texts_of(model, requests, known, schedule)
        assert texts == known
        accepted += more
    assert accepted > 40


@pytest.mark.parametrize("sampling", ["host", "hybrid", "device"])
def test_the_startup_check_passes_with_more_slots_than_tokens_in_a_row(reference, tmp_path, sampling):  # noqa: F811
    made = reference("llama, grouped")
    model = serve(made, tmp_path, max_batch_size=3, speculate=1, prefill_chunk=0, sampling=sampling)
    assert (model.verify_length, model.sampling) == (2, sampling)


def test_there_may_be_more_slots_than_tokens_in_a_row(reference, without, tmp_path):  # noqa: F811
    made = reference("llama, grouped")
    model = serve(made, tmp_path, max_batch_size=2 * K, speculate=K - 1, prefill_chunk=8, position_buckets=(16,))
    assert model.verify_length == K
    requests = [each for each in requests_of(made) if each.sampling.seed is None]
    known = without(model, requests)
    texts, accepted = texts_of(model, requests, known)
    assert texts == known and accepted


@pytest.mark.parametrize("sampling", ["host", "hybrid"])
def test_draft_tokens_of_short_texts_run_in_a_short_graph_and_are_embedded_alone(reference, tmp_path, monkeypatch, sampling):  # noqa: F811
    """Also where chunks of prompts have a graph: the library pads draft tokens to the length of one."""
    settings = {"speculate": K - 1, "prefill_chunk": 8, "position_buckets": (16,), "sampling": sampling}
    model = serve(reference("llama, grouped"), tmp_path, max_batch_size=2, **settings)
    embedded = []
    monkeypatch.setattr(
        torch.nn.functional, "embedding", lambda ids, *rest: embedded.append(ids.shape) or EMBEDDING(ids, *rest)
    )
    for slot in range(2):
        model.forward([Chunk(slot, [5, 6], 0)])
    for begin in (2, 5):
        embedded.clear()
        model.forward([Chunk(slot, [7, 8, 9], begin, verify=True) for slot in range(2)])
        assert simulator.cache_lengths(simulator.executions[-1]) == [16] and embedded == [(2, K)]


def test_rows_that_the_device_cannot_sample_are_verified_beside_others(reference, without, tmp_path):  # noqa: F811
    made = reference("llama, grouped")
    model = serve(made, tmp_path, max_batch_size=3, speculate=K - 1, sampling="hybrid", tp_degree=2)
    requests = [each for each in mixed_requests() if each.sampling.seed is None or each.sampling.is_seed_given]
    known = without(model, requests)
    texts, accepted = texts_of(model, requests, known)
    assert texts == known and accepted


def test_the_graph_of_draft_tokens_is_compiled_once_and_served_from_its_folder(reference, tmp_path, monkeypatch):  # noqa: F811
    made, output = reference("llama, grouped"), tmp_path / "compiled"
    words = ["--model-id", made.folder, "--output", output, "--tp-degree", "2", "--dtype", "float32", "--speculate", K - 1]
    words += ["--max-total-tokens", WINDOW, "--max-batch-size", 3]
    assert verb.main(list(map(str, words))) == 0
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron"), output, Manifest.read(output))
    model = NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path)))
    assert model.verify_length == K


def test_a_model_whose_draft_tokens_do_not_compile_is_served_without(reference, tmp_path, monkeypatch, caplog):  # noqa: F811
    real = compiler.compile_hlo_module

    def refuse(hlo_module, *arguments, **options):
        if f"speculation-k{K}" in str(arguments) + str(options):
            raise RuntimeError("this program is not for me")
        return real(hlo_module, *arguments, **options)

    monkeypatch.setattr(compiler, "compile_hlo_module", refuse)
    model = serve(reference("llama, grouped"), tmp_path, max_batch_size=3, speculate=K - 1, prefill_chunk=8)
    assert (model.verify_length, model.prefill_chunk) == (0, 8)
    assert "Speculative decoding is off (--speculate), as compiling for it failed" in caplog.text
