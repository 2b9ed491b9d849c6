"""Models with recurrent states on the real library: the logits and texts of transformers 5, which SERVER_PYTHON has."""

import json
import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import templates
import torch
from family_models import VOCABULARY
from loop import Driven, NoMetrics
from processes import Server, events
from safetensors.torch import load_file, save_file
from test_families import LARGEST, errors, mean_error
from test_server import as_float32, cores, refuse_to_compile, serve  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers_neuronx import compiler

from config import Config
from manifest import Manifest
from models.base import Chunk
from models.neuron import compile as verb
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel
from protocol import Cancel, Generate
from run import HERE, ConfigError

PYTHON = os.environ.get("SERVER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SERVER_PYTHON names no interpreter with transformers 5")
DENSE = ("qwen3_5, grouped", "qwen3_5, tied", "lfm2", "lfm2, tied", "granite 4", "granite 4, groups")
MIXTURES = ("qwen3_5_moe", "qwen3_next", "granite 4, experts")
KINDS = ("qwen3_5, grouped", "lfm2", "granite 4, groups")
CHUNK = 32
LIMITS = {"max_total_tokens": 192, "max_input_tokens": 191, "max_batch_size": 4, "position_buckets": (64,)}


class Made:
    def __init__(self, folder):
        self.folder = folder
        kept = torch.load(folder / "reference.pt")
        self.texts = kept["texts"].tolist()
        self.answers = kept["answers"]
        self.conversations = kept["conversations"]
        self.logits = kept["logits"]
        self.rounded = {dtype: kept[dtype] for dtype in ("bfloat16", "int8")}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    script = HERE / "tests/neuron_sim/recurrent_models.py"
    subprocess.run([PYTHON, "-E", script, folder], check=True, timeout=600)
    return lambda name: Made(folder / name)


class Slots:
    """Texts in slots, and the largest error of a logit after any of their tokens."""

    def __init__(self, model, reference):
        self.model = model
        self.reference = reference
        self.held = {}  # slot → (text, tokens of it)
        self.found, self.rows = [], []

    def _compare(self, output, rows):
        self.found.append(torch.from_numpy(as_float32(output).copy()))
        self.rows += rows

    def of(self, logits):
        """The rows of the same tokens."""
        return torch.stack([logits[text, end - 1] for text, end in self.rows])

    @property
    def worst(self):
        return errors(torch.cat(self.found), self.of(self.reference.logits)).max().item()

    def prompt(self, slot, text, length, all_logits=False, begin=0):
        size = self.model.prefill_chunk or length
        while begin < length:
            tokens = self.reference.texts[text][begin : min(begin + size, length)]
            output = self.model.forward([Chunk(slot, tokens, begin, all_logits)])
            ends = range(begin + 1, begin + len(tokens) + 1) if all_logits else [begin + len(tokens)]
            begin += len(tokens)
            self._compare(output, [(text, end) for end in ends])
        self.held[slot] = (text, length)

    def verify(self, chance, *slots):
        """Up to three draft tokens of each slot; the first ones are right."""
        chunks, kept, rows, first = [], [], [], 0
        for slot in slots:
            text, length = self.held[slot]
            drafts = chance.randrange(4)
            right = chance.randint(0, drafts)
            tokens = self.reference.texts[text][length : length + 1 + drafts]
            tokens[1 + right :] = [token % 300 + 5 for token in tokens[1 + right :]]
            chunks.append(Chunk(slot, tokens, length, verify=drafts > 0))
            kept += range(first, first + 1 + right)
            rows += [(text, end) for end in range(length + 1, length + 2 + right)]
            first += len(tokens)
            self.held[slot] = (text, length + 1 + right)
        self._compare(self.model.forward(chunks)[kept], rows)

    def step(self, *slots):
        chunks = []
        for slot in slots:
            text, length = self.held[slot]
            chunks.append(Chunk(slot, self.reference.texts[text][length : length + 1], length))
            self.held[slot] = (text, length + 1)
        self._compare(self.model.forward(chunks), [self.held[slot] for slot in slots])


@pytest.mark.parametrize(("tp_degree", "prefill_chunk"), [(1, CHUNK), (2, 16), (4, CHUNK), (12, CHUNK)])
@pytest.mark.parametrize("name", DENSE + MIXTURES)
def test_prompts_chunks_and_steps_have_transformers_logits(made, tmp_path, monkeypatch, name, tp_degree, prefill_chunk):
    """Of every length around a chunk; slots are used again, and idle ones keep their states."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-23")
    model = serve(made(name), tmp_path, tp_degree=tp_degree, prefill_chunk=prefill_chunk, sampling="host", **LIMITS)
    assert model.prefill_chunk == (prefill_chunk or None)
    slots = Slots(model, made(name))
    lengths = iter((1, 2, 5, 31, 32, 33, 63, 64, 65, 97, 128, 191))
    for number in range(3):
        for slot in (2, 0, 3, 1):
            slots.prompt(slot, (slot + number) % 6, next(lengths), all_logits=bool(prefill_chunk) and slot == 3)
            if prefill_chunk and number:
                slots.step(*[other for other, (_text, length) in sorted(slots.held.items()) if length < 100 and other != slot])
        for _ in range(3 if number < 2 else 1):
            slots.step(0, 1, 2, 3)
    print(f"{name}, tp {tp_degree}, chunk {prefill_chunk}: {len(slots.rows)} rows, {slots.worst:.1e}")
    assert slots.worst < LARGEST


def some_rows(model, reference):
    slots = Slots(model, reference)
    for slot, length in enumerate((5, 40, 97)):
        slots.prompt(slot, slot, length)
    for _ in range(20):
        slots.step(0, 1, 2)
    return slots


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_is_no_further_from_float32_than_transformers_own(made, tmp_path, name):
    reference = made(name)
    slots = some_rows(serve(reference, tmp_path, prefill_chunk=CHUNK, dtype="bfloat16", **LIMITS), reference)
    exact, theirs = slots.of(reference.logits), slots.of(reference.rounded["bfloat16"])
    assert mean_error(torch.cat(slots.found), exact) < 1.1 * mean_error(theirs, exact)


@pytest.mark.parametrize("name", [*KINDS, "qwen3_5_moe", "granite 4, experts"])
def test_a_model_is_compiled_and_served_from_the_artifact_in_int8(made, tmp_path, monkeypatch, name):
    reference, output = made(name), tmp_path / "compiled"
    words = ["--model-id", reference.folder, "--output", output, "--tp-degree", "2", "--dtype", "float32"]
    words += [
        "--max-total-tokens",
        192,
        "--max-batch-size",
        "4",
        "--prefill-chunk",
        CHUNK,
        "--quantize",
        "int8",
        "--speculate",
        3,
    ]
    assert verb.main(list(map(str, words))) == 0
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    config = Config(model_id=str(output), device="neuron", max_batch_size=3)  # of four slots
    build = BuildPlan.decide(config, output, Manifest.read(output))
    assert (build.config.max_total_tokens, build.config.max_input_tokens) == (192, 191)
    model = NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path)))
    slots = some_rows(model, reference)
    model.forward([Chunk(0, reference.texts[3][:30], 0, keep="border")])
    model.forward([Chunk(0, reference.texts[4][:30], 30)])
    model.states.resume(0, 0, 30)
    slots.prompt(0, 3, 60, begin=30)
    slots.verify(random.Random(2), 0, 1, 2)
    slots.step(0, 1, 2)
    assert errors(torch.cat(slots.found), slots.of(reference.rounded["int8"])).max() < LARGEST


SAMPLED = [(1, "device"), (1, "host"), (2, "hybrid")]


@pytest.mark.parametrize(
    ("name", "tp_degree", "sampling"),
    [(name, *where) for name in DENSE for where in SAMPLED] + [(name, 2, "hybrid") for name in MIXTURES],
)
def test_random_arrivals_get_transformers_text(made, tmp_path, name, tp_degree, sampling):
    settings = {"tp_degree": tp_degree, "prefill_chunk": CHUNK, "sampling": sampling}
    driven = Driven(served=serve(made(name), tmp_path, **LIMITS, **settings))
    chance = random.Random(5)
    for number, (prompt, answer) in enumerate(made(name).answers):
        driven.arrive(Generate(number, prompt, len(answer), ignore_eos=True, logprobs=number % 3 == 0))
        for _ in range(chance.randrange(4)):
            if not driven.is_idle or driven.wire.arrivals:
                driven.step()
    driven.run()
    assert [driven.tokens[number] for number in range(len(made(name).answers))] == [answer for _, answer in made(name).answers]


def test_the_text_of_a_vision_language_checkpoint_is_served_without_images(made, tmp_path, caplog):
    """As Qwen3.5 is published: the text's tensors below model.language_model, beside those of vision and of draft layers."""
    reference, folder = made("qwen3_5, tied"), tmp_path / "published"
    folder.mkdir()
    tensors = load_file(reference.folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"mtp.fc.weight": torch.zeros(2, 2), "model.visual.x": torch.zeros(2)}, folder / "model.safetensors")
    text = json.loads((reference.folder / "config.json").read_text())
    config = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5"},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    model = serve(None, tmp_path, folder, prefill_chunk=CHUNK, sampling="host", **LIMITS)
    assert model.encoder_cache is None and "only the text part of this model is served" in caplog.text
    assert some_rows(model, reference).worst < LARGEST


@pytest.mark.parametrize(
    ("name", "tp_degree"), [(name, tp_degree) for name in KINDS for tp_degree in (1, 2)] + [("qwen3_next", 4)]
)
def test_draft_tokens_never_enter_a_state(made, tmp_path, name, tp_degree):
    """Also of slots without drafts beside others, and beside an idle slot that is longer than these."""
    reference = made(name)
    model = serve(reference, tmp_path, tp_degree=tp_degree, prefill_chunk=CHUNK, speculate=3, sampling="host", **LIMITS)
    assert (model.verify_length, model.max_draft_rows) == (4, 16)
    slots, chance = Slots(model, reference), random.Random(1)
    for slot, length in enumerate((2, 40, 9, 97)):
        slots.prompt(slot, slot, length)
    for _ in range(20):
        slots.verify(chance, 0, 1, 2)
    slots.step(0, 1, 2, 3)  # of which some lag
    for _ in range(10):
        slots.verify(chance, 0, 3)
    slots.prompt(1, 4, 50)
    slots.step(0, 1, 3)
    slots.step(1)
    assert slots.worst < LARGEST


@pytest.mark.parametrize(
    ("name", "tp_degree", "sampling"),
    [(name, *where) for name in DENSE for where in SAMPLED] + [(name, 2, "hybrid") for name in MIXTURES],
)
def test_conversations_go_on_from_the_borders_of_their_messages(made, tmp_path, name, tp_degree, sampling):
    speculate = 0 if sampling == "device" else 3
    settings = {"tp_degree": tp_degree, "prefill_chunk": CHUNK, "sampling": sampling, "speculate": speculate}
    driven = Driven(served=serve(made(name), tmp_path, **LIMITS, **settings), metrics=NoMetrics())
    chance, running, wanted, held, ends = random.Random(7), {}, {}, {}, {}
    waiting = {number: list(turns) for number, turns in enumerate(made(name).conversations)}
    while any(waiting.values()) or not driven.is_idle or driven.wire.arrivals:
        for number, turns in waiting.items():
            last = running.get(number)
            if turns and chance.random() < 0.2 and (last is None or driven.tokens[last] == wanted[last]):
                prompt, borders, answer = turns.pop(0)
                last = running[number] = 10 * number + len(turns)
                wanted[last], held[last], ends[number] = answer, ends.get(number, 0), borders[-1]
                driven.arrive(Generate(last, prompt, len(answer), ignore_eos=True, borders=borders))
        driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
        driven.step()
    driven.run()
    assert {number: driven.tokens[number] for number in wanted} == wanted
    assert all(driven.prompts[number].cached >= tokens for number, tokens in held.items())


def test_without_memory_for_snapshots_prompts_run_whole(made, tmp_path):
    reference = made("qwen3_5, tied")
    model = serve(reference, tmp_path, prefill_chunk=CHUNK, sampling="host", max_snapshot_memory=0, **LIMITS)
    assert model.states.snapshots == 0
    model.forward([Chunk(0, reference.texts[0][:20], 0, keep="border")])
    assert model.states.reusable(0, 20) == 0


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_a_model_for_short_prompts_starts(made, tmp_path, longest):
    settings = {"max_input_tokens": longest, "max_total_tokens": longest + 2, "max_batch_size": 2}
    model = serve(made("lfm2"), tmp_path, prefill_chunk=CHUNK, speculate=1, **settings)
    assert (model.prefill_chunk, model.verify_length, model.max_input_tokens) == (CHUNK, 2, longest)


@pytest.mark.parametrize("setting", [{"prefill_chunk": 0}, {"prefill_chunk": 6, "speculate": 3}])
def test_chunks_without_room_for_draft_tokens_are_refused(made, tmp_path, setting):
    least = 2 * setting.get("speculate", 0) + 1
    with pytest.raises(ConfigError, match=rf"--prefill-chunk {setting['prefill_chunk']} .* give {least} or more"):
        serve(made("qwen3_5, tied"), tmp_path, **LIMITS, **setting)


def test_products_in_bfloat16_are_refused(made, tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type transformer --auto-cast=matmult")
    with pytest.raises(ConfigError, match="--auto-cast in NEURON_CC_FLAGS is not supported"):
        serve(made("qwen3_5, tied"), tmp_path, **LIMITS)


def test_a_cache_in_fp8_rounds_the_keys_and_values_alone(made, tmp_path):
    reference = made("qwen3_5, grouped")
    model = serve(reference, tmp_path, prefill_chunk=CHUNK, sampling="host", kv_cache_dtype="fp8_e4m3fn", **LIMITS)
    assert LARGEST < some_rows(model, reference).worst < 0.03


def save_tokenizer(folder, template):
    """One whose special tokens are those of Qwen3.5's template; the end of a text has the id that config.json says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([template], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    return tokenizer


@pytest.mark.timeout(600)
def test_a_turn_of_a_chat_prefills_what_is_new_through_all_processes(made, tmp_path):
    """API server processes send the borders of messages, as the worker says that the model has states: with the published
    template, which leaves out earlier reasoning, with a grammar, and beside a request whose client disconnects."""
    path = templates.COLLECTION / "qwen3.5.json"
    if not path.exists():
        pytest.skip("the published templates are not installed")
    folder = shutil.copytree(made("qwen3_5, tied").folder, tmp_path / "model")
    tokenizer = save_tokenizer(folder, json.loads(path.read_text())[0]["chat_template"])
    limits = {
        "MAX_BATCH_SIZE": "2",
        "TP_DEGREE": "1",
        "MAX_TOTAL_TOKENS": "1024",
        "POSITION_BUCKETS": "512",
        "PREFILL_CHUNK": "32",
        "DTYPE": "float32",
    }
    environment = {
        "NEURON_RT_VISIBLE_CORES": "0-1",
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "compiled"),
        "OMP_NUM_THREADS": "1",
    }
    one_of = {"type": "object", "properties": {"animal": {"enum": ["Numbat"]}}, "required": ["animal"]}
    grammar = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": one_of}}}
    chat = [{"role": "system", "content": "Answer briefly."}]
    begins = len(tokenizer.encode("<|im_start|>assistant\n<think>\n").ids)
    held = 0
    with Server("--device", "neuron", "--model-id", str(folder), **limits, **environment) as server:
        server.wait_ready()
        other = {
            "messages": [{"role": "user", "content": "Another chat"}],
            "stream": True,
            "max_tokens": 900,
            "ignore_eos": True,
        }
        neighbour = server.request("POST", "/v1/chat/completions", other)
        next(events(neighbour))
        for question in ("Which animal?", "And which one else?", "And then?"):
            chat.append({"role": "user", "content": question})
            body = {"messages": chat, "max_tokens": 60, "temperature": 0, "thinking_token_budget": 7, **grammar}
            answer = server.post("/v1/chat/completions", body)
            (choice,), usage = answer["choices"], answer["usage"]
            message = choice["message"]
            assert message["reasoning_content"] and '"Numbat"' in message["content"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == held
            held = usage["prompt_tokens"] - begins
            chat.append({name: message[name] for name in ("role", "content", "reasoning_content")})
            neighbour.close()
        server.wait_idle()
        assert "finish_reason=client_disconnected" in server.log
