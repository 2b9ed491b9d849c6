"""The server's NeuronModel on the real library: greedy text equals transformers', whatever else is in the batch."""

import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from fakes.model import EOS
from grammars import grammars_of
from loop import Driven
from test_simulator import ARCHITECTURES, SMALL, VOCABULARY, Reference, reference  # noqa: F401
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers_neuronx import compiler

from config import Config
from manifest import Manifest
from models.base import Chunk
from models.errors import ModelError
from models.neuron import build as neuron_build
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel
from protocol import Generate, SamplingParams
from run import HERE
from text.grammar import of_json_schema

WINDOW = 48


@pytest.fixture(autouse=True)
def cores(monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))


def serve(made, tmp_path, folder=None, **settings):
    settings = {"max_total_tokens": WINDOW, "max_input_tokens": WINDOW - 1, "dtype": "float32", "tp_degree": 1} | settings
    folder = Path(folder or made.folder)
    manifest = Manifest.read(folder)
    build = BuildPlan.decide(Config(model_id=str(folder), device="neuron", **settings), folder, manifest)
    return NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path)))


GREEDY = (1, 1.0, 1.0)


class Batch:
    """Sequences in slots, each continued greedily, or with what the device samples, as the worker does it."""

    def __init__(self, model):
        self.model = model
        self.texts = {}

    def join(self, slot, prompt, sampling=GREEDY):
        if self.model.sampling == "device":
            self.model.set_sampling(slot, *sampling)
        self.texts[slot] = [*prompt, *next_tokens(self.model, Chunk(slot, prompt, 0))]

    def step(self):
        slots = sorted(self.texts)
        chunks = [Chunk(slot, self.texts[slot][-1:], len(self.texts[slot]) - 1) for slot in slots]
        for slot, token in zip(slots, next_tokens(self.model, *chunks)):
            self.texts[slot].append(token)

    def leave(self, slot):
        return self.texts.pop(slot)


def next_tokens(model, *chunks):
    output = model.forward(chunks)
    return (output.ids if model.sampling == "device" else as_float32(output).argmax(-1)).tolist()


def as_float32(logits):
    return (logits.astype(np.uint32) << 16).view(np.float32) if logits.dtype == np.uint16 else logits


def sampled(model, slot, prompt):
    return next_tokens(model, Chunk(slot, prompt, 0))[0]


def assert_like(made, prompt, text):
    assert text == [*prompt, *made.greedy(prompt, len(text) - len(prompt))]


LIKE_LLAMA = itertools.product(["llama", "llama, grouped", "mistral"], [1, 2, 4], ["host", "device"])


@pytest.mark.parametrize(("name", "tp_degree", "sampling"), LIKE_LLAMA)
def test_requests_that_come_and_go_get_transformers_text(reference, tmp_path, name, tp_degree, sampling):  # noqa: F811
    made = reference(name)
    batch = Batch(serve(made, tmp_path, max_batch_size=3, tp_degree=tp_degree, sampling=sampling))
    prompts = {0: [3, 100, 7], 2: [9], 1: list(range(1, WINDOW))}
    batch.join(0, prompts[0])
    batch.step()
    batch.join(2, prompts[2])
    batch.step()
    batch.join(1, prompts[1])
    assert_like(made, prompts[1], batch.leave(1))
    for _ in range(8):
        batch.step()
    assert_like(made, prompts[0], batch.leave(0))
    batch.join(0, [50, 60])
    while len(batch.texts[2]) < WINDOW:
        batch.step()
    assert_like(made, prompts[2], batch.leave(2))
    assert_like(made, [50, 60], batch.leave(0))


@pytest.mark.parametrize(
    "options",
    [
        ["collectives_layout=BSH"],
        ["on_device_embedding=true"],
        ["sequence_parallel_norm=true", "sequence_parallel_norm_threshold=16"],
        ["on_device_embedding=true", "sequence_parallel_norm=true", "sequence_parallel_norm_threshold=16"],
        ["shard_over_sequence=true"],
        ["collectives_layout=BSH", "on_device_embedding=true", "shard_over_sequence=true"],
    ],
    ids=",".join,
)
def test_options_of_the_library_change_no_text(reference, tmp_path, options):  # noqa: F811
    made = reference("llama, grouped")
    buckets = {"prefill_buckets": (8, 32), "max_input_tokens": 32}  # above 16 they have to divide by tp_degree
    tp_degree = 4 if "shard_over_sequence=true" in options else 2  # more than there are key-value heads
    model = serve(made, tmp_path, max_batch_size=2, tp_degree=tp_degree, neuron_config=tuple(options), **buckets)
    long = [(7 * i) % 255 + 1 for i in range(32)]
    rows = [model.forward([Chunk(1, long, 0)])[0], model.forward([Chunk(0, [9], 0)])[0]]
    rows += [*model.forward([Chunk(0, [4], 1), Chunk(1, [5], 32)])]
    for row, text in zip(rows, ([*long], [9], [9, 4], [*long, 5])):
        assert np.abs(row - made.logits(text).numpy()).max() < 1e-3 and row.argmax() == made.logits(text).argmax()


def test_a_cache_that_is_sharded_by_positions_changes_no_text_beyond_the_first_position_bucket(reference, tmp_path):  # noqa: F811
    """The library lays a slot over the cores by the length of the graph: one of 160 does not find what one of 128 wrote."""
    made, prompts = reference("llama, grouped"), {0: [3, 100, 7], 1: [(7 * n) % 255 + 1 for n in range(120)]}
    lengths = {"max_total_tokens": 160, "max_input_tokens": 159}  # by default position buckets of 128 and 160
    model = serve(made, tmp_path, max_batch_size=2, tp_degree=4, neuron_config=("shard_over_sequence=true",), **lengths)
    batch = Batch(model)
    for slot, prompt in prompts.items():
        batch.join(slot, prompt)
    while len(batch.texts[1]) < 160:
        batch.step()
    for slot, prompt in prompts.items():
        assert_like(made, prompt, batch.leave(slot))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_tiled_weights_change_no_logit(tmp_path, quantize):
    made = Reference(transformers.LlamaConfig(**SMALL | {"hidden_size": 128, "intermediate_size": 256}), tmp_path / "model")
    settings = {"max_batch_size": 2, "tp_degree": 2, "quantize": quantize}
    plain, tiled = (serve(made, tmp_path, neuron_config=options, **settings) for options in ((), ("weight_tiling=true",)))
    rows = [[model.forward([Chunk(1, [3, 100, 7], 0)])[0], model.forward([Chunk(1, [9], 3)])[0]] for model in (plain, tiled)]
    assert np.abs(np.subtract(*rows)).max() < 1e-4
    assert quantize or np.abs(rows[1][0] - made.logits([3, 100, 7]).numpy()).max() < 1e-3


def test_weights_that_make_no_whole_tiles_are_refused_in_one_line(reference, tmp_path):  # noqa: F811
    with pytest.raises(ModelError, match=r"divisible by 128") as refused:
        serve(reference("llama"), tmp_path, neuron_config=("weight_tiling=true",))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("sampling", ["host", "hybrid"])
def test_a_model_with_damaged_weights_is_refused_at_the_start(tmp_path, caplog, sampling):
    made = Reference(ARCHITECTURES["llama"](), tmp_path / "model")
    made.model.model.layers[1].input_layernorm.weight.data[3] = float("nan")
    made.model.save_pretrained(made.folder)
    with pytest.raises(ModelError, match="computes logits that are NaN or infinite in float32"):
        serve(made, tmp_path, max_batch_size=2, prefill_chunk=8, speculate=3, sampling=sampling)
    assert "Chunked prefill is off" not in caplog.text and "On-device sampling is off" not in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_views_in_the_librarys_order_and_stay_as_they_are(reference, tmp_path, dtype):  # noqa: F811
    """The layout that sampling.py and bench/simulated are made for, and a fresh buffer for each call."""
    model = serve(reference("llama"), tmp_path, max_batch_size=4, tp_degree=2, dtype=dtype)
    outputs = [model.forward([Chunk(slot, [slot + 1, 7, 9 * slot + 2], 0)]) for slot in range(4)]
    copies = [output.copy() for output in outputs]
    for position, slots in enumerate(([0, 1, 2, 3], [0, 1, 2], [0]), 3):
        outputs.append(model.forward([Chunk(slot, [5], position) for slot in slots]))
        copies.append(outputs[-1].copy())
        assert outputs[-1].strides == (outputs[-1].itemsize, 4 * outputs[-1].itemsize)
    assert all(np.array_equal(output, copy) for output, copy in zip(outputs, copies))


@pytest.mark.parametrize(("name", "quantize"), [("llama", None), ("llama", "int8"), ("mistral", "int8"), ("mixtral", None)])
def test_bfloat16_logits_equal_the_librarys_float32_ones(reference, tmp_path, monkeypatch, name, quantize):  # noqa: F811
    """Nothing is lost where they are taken as they come; and the graphs are the same."""
    made, logits = reference(name), []
    for dtypes in ("bfloat16",), ():
        monkeypatch.setattr(neuron_build, "LOGITS_DTYPES", dtypes)
        model = serve(made, tmp_path, dtype="bfloat16", max_batch_size=2, quantize=quantize)
        logits.append(np.concatenate([model.forward([Chunk(0, [3, 100, 7], 0)]), model.forward([Chunk(0, [9], 3)])]))
        monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    assert [output.dtype for output in logits] == [np.uint16, np.float32]
    assert np.array_equal(as_float32(logits[0]), logits[1])


def test_random_schedules_over_eight_slots_give_every_request_its_own_text(reference, tmp_path):  # noqa: F811
    made = reference("llama, grouped")
    batch = Batch(serve(made, tmp_path, max_batch_size=8, prefill_buckets=(8, 16), position_buckets=(16, 32)))
    chance, prompts = random.Random(0), {}
    for _ in range(40):
        slot = chance.randrange(8)
        if slot in batch.texts:
            assert_like(made, prompts[slot], batch.leave(slot))
        prompts[slot] = [chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(1, 30))]
        batch.join(slot, prompts[slot])
        for _ in range(chance.randrange(4)):
            for full in [s for s, text in batch.texts.items() if len(text) >= WINDOW]:
                assert_like(made, prompts[full], batch.leave(full))
            if batch.texts:
                batch.step()
    for slot in list(batch.texts):
        assert_like(made, prompts[slot], batch.leave(slot))


def test_rows_with_a_grammar_follow_it_and_free_rows_get_transformers_text(reference, tmp_path):  # noqa: F811
    made, characters = reference("llama, grouped"), {chr(33 + n): n + 1 for n in range(94)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={"<eos>": EOS, **characters}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
    schema["properties"]["n"] |= {"minimum": 10, "maximum": 99}
    grammars, serialized = grammars_of(tokenizer, VOCABULARY, [EOS]), of_json_schema(schema)
    grammars.matcher(serialized)
    driven = Driven(grammars=grammars, served=serve(made, tmp_path, max_batch_size=4, dtype="float32"))
    free = {n: Generate(n, [n + 1, 7, 30 * n + 9], 20, ignore_eos=True) for n in range(4)}
    warm = [SamplingParams(), SamplingParams(seed=5, temperature=1.5), SamplingParams(seed=6, top_k=40)]
    guided = [Generate(10 + n, [n + 2, 60], 40, sampling=each, grammar=serialized) for n, each in enumerate(warm)]
    driven.arrive(free[0], guided[0], free[1], guided[1], free[2], guided[2], free[3])
    driven.run()
    for n, request in free.items():
        assert_like(made, request.prompt, [*request.prompt, *driven.tokens[n]])
    for request in guided:
        jsonschema.validate(json.loads(tokenizer.decode(driven.tokens[request.id])), schema)


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_sampled_slots_do_not_change_the_text_of_greedy_ones(reference, tmp_path, tp_degree):  # noqa: F811
    made = reference("llama, grouped")
    batch = Batch(serve(made, tmp_path, max_batch_size=4, tp_degree=tp_degree, sampling="device"))
    chance, prompts, parameters, drawn = random.Random(1), {}, {}, []

    def leave(slot):
        text, length = batch.leave(slot), len(prompts[slot])
        if parameters[slot] == GREEDY:
            assert_like(made, prompts[slot], text)
        else:
            drawn.append(text[length:] != made.greedy(prompts[slot], len(text) - length))

    for _ in range(30):
        slot = chance.randrange(4)
        if slot in batch.texts:
            leave(slot)
        prompts[slot] = [chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(1, 30))]
        parameters[slot] = chance.choice([GREEDY, (0, 1.0, 50.0), (100, 0.99, 50.0)])
        batch.join(slot, prompts[slot], parameters[slot])
        for _ in range(chance.randrange(4)):
            for full in [s for s, text in batch.texts.items() if len(text) >= WINDOW]:
                leave(full)
            if batch.texts:
                batch.step()
    assert len(drawn) > 10 and drawn.count(False) <= 2


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_and_steps_are_sampled_with_what_is_set_for_their_slot(reference, tmp_path, dtype, slot):  # noqa: F811
    """The first token too, although the graph of a prompt has one row only."""
    made, prompt = reference("llama"), [3, 100, 7]
    model = serve(made, tmp_path, max_batch_size=3, sampling="device", dtype=dtype)
    others = [other for other in range(3) if other != slot]
    for other in others:
        model.set_sampling(other, *GREEDY)
    model.set_sampling(slot, 4, 1.0, 2.0)
    first, second = [], []
    for _ in range(300):
        first.append(sampled(model, slot, prompt))
        second += next_tokens(model, Chunk(slot, [9], len(prompt)))
    for text, drawn in ((prompt, first), ([*prompt, 9], second)):
        logits, ids = made.logits(text).topk(4)
        likely = torch.softmax(logits / 2.0, -1)
        shares = torch.tensor([drawn.count(token) / len(drawn) for token in ids.tolist()])
        assert (shares - likely).abs().max() < 0.13  # four standard deviations, and what bfloat16 rounds
        assert set(drawn) <= set(ids.tolist())
        for other in others:
            assert {sampled(model, other, text) for _ in range(5)} == {int(ids[0])}


def test_top_p_keeps_the_fewest_tokens_that_reach_it(reference, tmp_path):  # noqa: F811
    made, prompt = reference("llama"), [3, 100, 7]
    likely, ids = made.logits(prompt).softmax(-1).topk(4)
    model = serve(made, tmp_path, max_batch_size=2, sampling="device")
    for count in (1, 2, 3):
        model.set_sampling(1, 0, float(likely[:count].sum()) - 0.005, 1.0)
        assert {sampled(model, 1, prompt) for _ in range(100)} <= set(ids[:count].tolist())
    model.set_sampling(1, 0, 1e-30, 1e300)
    assert {sampled(model, 1, prompt) for _ in range(20)} == {int(ids[0])}


@pytest.mark.parametrize("temperature", [1e-300, 0.0099, 0.01, 1.0, 1e4, 1e300])
def test_any_temperature_gives_tokens_of_the_vocabulary(reference, tmp_path, temperature):  # noqa: F811
    key = "temperatures"
    if key not in _kept:
        _kept[key] = serve(reference("llama"), tmp_path, max_batch_size=2, sampling="device", dtype="float16")
    likeliest = reference("llama").logits([3, 100, 7]).topk(3).indices.tolist()
    for top_k in (0, 3):
        _kept[key].set_sampling(1, top_k, 1.0, temperature)
        drawn = {sampled(_kept[key], 1, [3, 100, 7]) for _ in range(60)}
        assert 0 <= min(drawn) <= max(drawn) < VOCABULARY
        if temperature < 1:
            assert drawn == {likeliest[0]}
        elif top_k:
            assert drawn == set(likeliest)


@pytest.mark.parametrize("temperature", [1e-5, 3e-4, 0.0099, 0.01, 0.02])
def test_a_low_temperature_does_not_bring_back_tokens_that_top_k_removed(tmp_path, temperature):
    """The library gives what it filters the logit -30000, after the temperature: -20 / 3e-4 would come below that."""
    key = "negative logits"
    if key not in _kept:
        made, states = Reference(ARCHITECTURES["llama"](), tmp_path / "made"), []
        with made.model.model.norm.register_forward_hook(lambda module, given, state: states.append(state[0, -1])):
            made.logits([3, 100, 7])
        unlikely = -20 * states[0] / states[0].dot(states[0])
        made.model.lm_head.weight.data[:] = unlikely * (1 + 0.01 * torch.arange(VOCABULARY)[:, None])
        made.model.save_pretrained(made.folder)
        assert made.logits([3, 100, 7])[:3].tolist() == pytest.approx([-20.0, -20.2, -20.4], abs=1e-3)
        _kept[key] = serve(made, tmp_path, max_batch_size=2, sampling="device")
    _kept[key].set_sampling(1, 3, 1.0, temperature)
    assert {sampled(_kept[key], 1, [3, 100, 7]) for _ in range(20)} == {0}


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, WINDOW - 1])
def test_the_text_is_the_same_across_the_borders_of_buckets(reference, tmp_path, length):  # noqa: F811
    made = reference("llama")
    key = "borders"
    if key not in _kept:
        _kept[key] = serve(made, tmp_path, max_batch_size=2, prefill_buckets=(8, 16, 32), position_buckets=(8, 16, 32))
    batch = Batch(_kept[key])
    prompt = [(3 + 5 * n) % 250 + 1 for n in range(length)]
    batch.join(0, [3, 4])
    batch.join(1, prompt)
    while len(batch.texts[1]) < WINDOW:
        batch.step()
    assert_like(made, prompt, batch.leave(1))
    assert_like(made, [3, 4], batch.leave(0))


_kept = {}  # one model for all lengths: building it is what takes long


@pytest.mark.parametrize("form", [4, 5])
def test_a_rotary_base_other_than_the_default_works_in_both_forms_of_the_config(tmp_path, form):
    """In the form of transformers 5 the library alone would use 10000, which gives wrong text."""
    import transformers

    folder = tmp_path / "theta"
    made = Reference(transformers.LlamaConfig(**SMALL, rope_theta=500000.0), folder)
    if form == 5:
        saved = json.loads((folder / "config.json").read_text())
        saved["rope_parameters"] = {"rope_theta": saved.pop("rope_theta"), "rope_type": "default"}
        saved["dtype"] = saved.pop("torch_dtype", saved.pop("dtype", "float32"))
        saved.pop("rope_scaling", None)
        (folder / "config.json").write_text(json.dumps(saved))
    batch = Batch(serve(made, tmp_path, folder=folder, max_batch_size=2))
    prompt = list(range(1, 30))
    batch.join(0, prompt)
    for _ in range(10):
        batch.step()
    assert_like(made, prompt, batch.leave(0))


def refuse_to_compile(*arguments):
    raise AssertionError("this was compiled before")


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_programs_that_another_process_compiled_without_a_device_are_loaded(
    reference,  # noqa: F811
    tmp_path,
    monkeypatch,
    tp_degree,
):
    made = reference("llama, grouped")
    output = tmp_path / "compiled"
    words = ["--model-id", str(made.folder), "--output", str(output), "--tp-degree", str(tp_degree), "--dtype", "float32"]
    words += ["--max-batch-size", "3", "--max-total-tokens", str(WINDOW), "--prefill-buckets", "8", "--position-buckets", "16"]
    subprocess.run([sys.executable, "-m", "models.neuron.compile", *words], cwd=HERE, check=True)
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron", max_batch_size=2), output, Manifest.read(output))
    batch = Batch(NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path))))
    prompts = {0: [3, 100, 7], 1: list(range(1, 20))}
    for slot, prompt in prompts.items():
        batch.join(slot, prompt)
    for _ in range(10):
        batch.step()
    for slot, prompt in prompts.items():
        assert_like(made, prompt, batch.leave(slot))


def test_a_plain_checkpoint_is_compiled_once(reference, tmp_path, monkeypatch):  # noqa: F811
    made = reference("mistral")
    serve(made, tmp_path, max_batch_size=2)
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    batch = Batch(serve(made, tmp_path, max_batch_size=2))
    batch.join(1, [3, 100, 7])
    batch.step()
    assert_like(made, [3, 100, 7], batch.leave(1))
    with pytest.raises(ModelError):
        serve(made, tmp_path, max_batch_size=3)


def test_the_library_is_the_real_one():
    assert "site-packages" in sys.modules["transformers_neuronx"].__file__
    assert not hasattr(sys.modules["transformers_neuronx"], "simulated")
