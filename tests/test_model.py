"""What a slot generates is what `transformers` alone would generate, whoever is in the other slots; and what is refused.

The checkpoints are tiny and random (`tiny_models`); the expected tokens come from `generate`, greedily, one prompt at a time
or several of one length, up to the last position of the window.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
import tiny_models
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import POSITIONS, VOCABULARY, edit_config, save_checkpoint
from tokenizers import Tokenizer

import decoder
import torch_model
from config import HERE, Config, Manifest
from cuda_graphs import RecordedSteps
from model import ModelError, Part, convert_tokenizer, fetch, parts_of
from worker import prepare

LENGTHS = (1, 2, 5, 11, 16, POSITIONS - 1)  # around the sliding window of 8, and as long as a prompt can be
PROMPTS_PER_LENGTH = 2  # one for the families that are only looked at quickly
CANDIDATES = 6
MARGIN = 1e-3  # a smaller lead of the likeliest token could turn with the order in which numbers are added up


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Steps this small only wait for one another on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Reference:
    """A prompt and all that `generate` continues it with, up to the last position."""

    prompt: list[int]
    tokens: list[int]


class Zoo:
    """One checkpoint per family, and what each must generate; everything is made once, when it is first asked for."""

    def __init__(self, root: Path):
        self._root = root
        self.folder = cache(self._save)
        self.references = cache(self._generate)
        self.served = cache(self._serve)

    def _save(self, family: str) -> Path:
        return save_checkpoint(self._root / family, tiny_models.ALL[family]())

    def _generate(self, family: str) -> list[Reference]:
        reference = reference_model(self.folder(family))
        random = torch.Generator().manual_seed(1)
        most = PROMPTS_PER_LENGTH if family in tiny_models.FAMILIES else 1
        return [found for length in LENGTHS for found in itertools.islice(clear_cut(reference, length, random), most)]

    def _serve(self, family: str, slots: int):
        return serve(self.folder(family), max_batch_size=slots)

    def of_length(self, family: str, *lengths: int) -> list[Reference]:
        """References of these lengths in this order: the second of a length that is asked for twice."""
        found = {n: iter([r for r in self.references(family) if len(r.prompt) == n]) for n in LENGTHS}
        return [next(found[length]) for length in lengths]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("zoo"))


def reference_model(folder, **changes):
    """`transformers`' own model. Eager, because its faster attention leaves Gemma-2's softcaps out."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager").eval()


def generate(reference, prompts: list[list[int]], window: int = POSITIONS) -> tuple[list[list[int]], list[float]]:
    """What `transformers` continues each prompt with, all of one length, and the smallest lead of a chosen token in each."""
    ids = torch.tensor(prompts)
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=window - ids.shape[1],
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best, second = torch.stack(out.logits).topk(2).values.unbind(-1)
    return out.sequences[:, ids.shape[1] :].tolist(), (best - second).min(0).values.tolist()


def clear_cut(reference, length: int, random: torch.Generator):
    """References whose every token is the likeliest by a clear margin."""
    while True:
        prompts = torch.randint(0, VOCABULARY, (CANDIDATES, length), generator=random).tolist()
        for prompt, tokens, margin in zip(prompts, *generate(reference, prompts)):
            if margin > MARGIN:
                yield Reference(prompt, tokens)


def serve(folder, max_total_tokens: int | None = POSITIONS, device: str = "cpu", **changes):
    manifest = Manifest.read(folder)
    config = Config(model_id=str(folder), device=device, max_total_tokens=max_total_tokens, **changes)
    _config, _fetch_rest, load = prepare(config, folder, manifest)
    return load(lambda phase: None)


@dataclass
class Text:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)


class Batch:
    """The slots of a model as the worker uses them: the lowest free one first, one step for all that live."""

    def __init__(self, model):
        self.model = model
        self.live: dict[int, Text] = {}

    @property
    def free(self) -> int | None:
        return next((slot for slot in range(self.model.batch_size) if slot not in self.live), None)

    def join(self, reference: Reference) -> Text:
        slot, text = self.free, Text(reference.prompt)
        self.live[slot] = text
        self._gain(slot, self.model.prefill(slot, text.prompt)[0])
        return text

    def join_scored(self, reference: Reference) -> tuple[Text, torch.Tensor]:
        """Joins by `score`; the logits after each token of the prompt come, too."""
        slot, text = self.free, Text(reference.prompt)
        self.live[slot] = text
        logits = torch.cat(list(self.model.score(slot, text.prompt)))
        self._gain(slot, logits[-1])
        return text, logits

    def step(self) -> None:
        live = sorted(self.live.items())
        tokens = torch.tensor([text.tokens[-1] for _slot, text in live])
        positions = torch.tensor([len(text.prompt) + len(text.tokens) - 1 for _slot, text in live])
        logits = self.model.decode(tokens, positions, torch.tensor([slot for slot, _text in live]))
        for (slot, _text), row in zip(live, logits):
            self._gain(slot, row)

    def _gain(self, slot: int, logits: torch.Tensor) -> None:
        text = self.live[slot]
        text.tokens.append(int(logits.argmax()))
        if len(text.prompt) + len(text.tokens) == self.model.max_total_tokens:
            del self.live[slot]

    def leave(self, text: Text) -> None:
        self.live = {slot: other for slot, other in self.live.items() if other is not text}

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def run(self) -> None:
        while self.live:
            self.step()


def continued(model, reference: Reference) -> list[int]:
    """What a prompt that is alone in the batch generates, to the end of the window."""
    batch = Batch(model)
    text = batch.join(reference)
    batch.run()
    return text.tokens


each_family = pytest.mark.parametrize("family", tiny_models.FAMILIES)


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_a_prompt_alone_generates_what_transformers_does_up_to_the_last_position(zoo, family):
    model = serve(zoo.folder(family), max_batch_size=3)
    for reference in zoo.references(family):
        tokens = continued(model, reference)
        assert tokens == reference.tokens
        assert len(reference.prompt) + len(tokens) == POSITIONS


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_a_full_batch_generates_what_each_would_alone(zoo, family):
    references = zoo.of_length(family, 16, 1, 5, 11)
    batch = Batch(serve(zoo.folder(family), max_batch_size=4))
    texts = [batch.join(reference) for reference in references]
    batch.run()
    assert [text.tokens for text in texts] == [reference.tokens for reference in references]


@pytest.mark.parametrize("family", tiny_models.WITH_THEIR_OWN_ATTENTION)
def test_a_family_with_an_attention_of_its_own_gets_a_mask(zoo, family):
    assert zoo.served(family, 4)._mask_is_given


@each_family
def test_a_late_joiner_changes_nobody(zoo, family):
    references = zoo.of_length(family, 5, 2, 16, 1)
    batch = Batch(serve(zoo.folder(family), max_batch_size=4))
    texts = [batch.join(reference) for reference in references[:2]]
    batch.steps(6)
    texts.append(batch.join(references[2]))
    batch.steps(3)
    texts.append(batch.join(references[3]))
    batch.run()
    assert [text.tokens for text in texts] == [reference.tokens for reference in references]


@each_family
def test_a_slot_used_again_remembers_nothing(zoo, family):
    references = zoo.of_length(family, 16, 1, 11, 2, POSITIONS - 1, 5)
    batch = Batch(serve(zoo.folder(family), max_batch_size=1))
    texts = []
    for reference in references:
        texts.append(batch.join(reference))
        batch.run()
    assert [text.tokens for text in texts] == [reference.tokens for reference in references]


@each_family
def test_a_slot_used_again_mid_way_changes_neither_its_neighbour_nor_its_new_text(zoo, family):
    neighbour, long, short, long_again = references = zoo.of_length(family, 1, 16, 5, 11)
    batch = Batch(serve(zoo.folder(family), max_batch_size=2))
    texts = [batch.join(neighbour), batch.join(long)]
    batch.steps(4)
    batch.leave(texts[1])
    texts.append(batch.join(short))
    batch.steps(3)
    batch.leave(texts[2])
    texts.append(batch.join(long_again))
    batch.run()
    lengths = [len(neighbour.tokens), 5, 4, len(long_again.tokens)]
    assert [text.tokens for text in texts] == [reference.tokens[:n] for reference, n in zip(references, lengths)]


@each_family
def test_free_rows_among_the_live_ones_change_nobody(zoo, family):
    first, second, third, last, newcomer = references = zoo.of_length(family, 11, 2, 1, 5, 16)
    batch = Batch(serve(zoo.folder(family), max_batch_size=4))
    texts = [batch.join(reference) for reference in (first, second, third, last)]
    batch.steps(2)
    batch.leave(texts[1])
    batch.leave(texts[2])
    batch.steps(3)
    batch.leave(texts[0])
    batch.steps(3)
    texts.append(batch.join(newcomer))
    batch.run()
    lengths = [6, 3, 3, len(last.tokens), len(newcomer.tokens)]
    assert [text.tokens for text in texts] == [reference.tokens[:n] for reference, n in zip(references, lengths)]


@each_family
def test_replayed_steps_give_everybody_their_own_tokens(zoo, family, monkeypatch):
    """What is replayed is the step itself, on rows and lengths that were recorded."""
    monkeypatch.setattr(torch_model, "lengths_for", lambda window: [window // 2, window])
    replayed = []

    def record(run, _pool):
        return lambda: (replayed.append(run), run())

    monkeypatch.setattr(torch_model, "RecordedSteps", functools.partial(RecordedSteps, record=record))
    first, second, third, last, newcomer = references = zoo.of_length(family, 11, 2, 1, 5, 16)
    model = serve(zoo.folder(family), max_batch_size=5)
    model._record(Config(cuda_graphs=(2, 4)), torch.ones(1))
    replayed.clear()
    batch = Batch(model)
    texts = [batch.join(reference) for reference in (first, second, third, last)]
    batch.steps(3)
    for text in texts[:3]:
        batch.leave(text)
    texts.append(batch.join(newcomer))
    batch.run()
    assert len(set(replayed)) > 1, "steps are replayed, and not all by the same graph"
    lengths = [4, 4, 4, len(last.tokens), len(newcomer.tokens)]
    assert [text.tokens for text in texts] == [reference.tokens[:n] for reference, n in zip(references, lengths)]


def test_a_model_whose_steps_cannot_be_recorded_is_served_without(zoo, monkeypatch, caplog):
    def record(*_args):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch_model, "RecordedSteps", record)
    model, reference = serve(zoo.folder("llama"), max_batch_size=2), zoo.of_length("llama", 5)[0]
    model._record(Config(), torch.ones(1))
    why = "RuntimeError: operation not permitted when stream is capturing"
    told = f"This model's steps cannot be recorded as CUDA graphs ({why}); it runs as it is, slower"
    assert told in [record.getMessage() for record in caplog.records]
    assert continued(model, reference) == reference.tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
@each_family
@pytest.mark.parametrize("sizes", [None, ()])
def test_on_a_gpu_a_full_batch_generates_what_each_would_alone_recorded_or_not(zoo, family, sizes):
    references = zoo.of_length(family, 11, 2, 1, 5)
    model = serve(zoo.folder(family), device="cuda", dtype="float32", max_batch_size=4, cuda_graphs=sizes)
    assert (model._recorded is None) == (sizes == ())
    batch = Batch(model)
    texts = [batch.join(reference) for reference in references]
    batch.run()
    assert [text.tokens for text in texts] == [reference.tokens for reference in references]


@dataclass(frozen=True)
class Visit:
    """A prompt that comes `wait` steps after the one before it, and leaves after `tokens` tokens, or at the end."""

    reference: int
    wait: int
    tokens: int | None


visits = st.builds(
    Visit,
    reference=st.integers(0, len(LENGTHS) * PROMPTS_PER_LENGTH - 1),
    wait=st.integers(0, 8),
    tokens=st.none() | st.integers(1, 12),
)


@each_family
@given(slots=st.integers(3, 4), schedule=st.lists(visits, min_size=1, max_size=8))
@settings(max_examples=26, suppress_health_check=[HealthCheck.too_slow])  # 8 families: 208 schedules
def test_whoever_comes_and_goes_everybody_gets_their_own_tokens(zoo, family, slots, schedule):
    references = zoo.references(family)
    batch = Batch(zoo.served(family, slots))
    due = itertools.accumulate(visit.wait for visit in schedule)
    arrivals, texts = deque(zip(due, schedule)), []
    step = 0
    while arrivals or batch.live:
        while arrivals and arrivals[0][0] <= step and batch.free is not None:
            visit = arrivals.popleft()[1]
            texts.append(batch.join(references[visit.reference]))
        for visit, text in zip(schedule, texts):
            if len(text.tokens) == visit.tokens:
                batch.leave(text)
        if batch.live:
            batch.step()
        step += 1
    expected = [references[visit.reference].tokens[: visit.tokens] for visit in schedule]
    assert [text.tokens for text in texts] == expected


@pytest.mark.parametrize("family", tiny_models.ALL)
def test_the_texts_differ_so_that_a_mix_up_would_show(zoo, family):
    references = zoo.references(family)
    assert len({tuple(reference.tokens) for reference in references}) >= len(references) - 1  # of two texts of one token
    assert len({token for reference in references for token in reference.tokens}) > 15


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("qwen2-sliding", {"layer_types": ["full_attention"] * 3}),
        ("qwen2-sliding", {"layer_types": ["sliding_attention"] * 3}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("llama", {"rope_parameters": tiny_models.rope(rope_theta=10000.0)}),
    ],
)
def test_what_makes_a_family_special_matters_to_its_texts(zoo, family, changes):
    reference = zoo.of_length(family, 5)[0]
    without = reference_model(zoo.folder(family), **changes)
    assert generate(without, [reference.prompt])[0] != [reference.tokens]


@pytest.mark.parametrize("window", [6, 12, POSITIONS - 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt-j"])
def test_a_window_smaller_than_the_models_ends_a_text_early_and_changes_nothing_else(zoo, family, window):
    reference = zoo.of_length(family, 5)[0]
    model = serve(zoo.folder(family), max_total_tokens=window)
    assert continued(model, reference) == reference.tokens[: window - 5]


@pytest.mark.parametrize(("slots", "window", "longest"), [(1, 2, 1), (3, 2, 1), (1, POSITIONS, 2), (3, POSITIONS, 5)])
def test_limits_may_be_as_small_as_they_get(zoo, slots, window, longest):
    reference = zoo.of_length("llama", longest)[0]
    model = serve(zoo.folder("llama"), max_batch_size=slots, max_total_tokens=window, max_input_tokens=longest)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (slots, window, longest)
    assert continued(model, reference) == reference.tokens[: window - longest]


def test_a_model_says_what_it_is(zoo):
    model = serve(zoo.folder("llama"), max_batch_size=3, max_total_tokens=None)
    facts = (model.batch_size, model.max_total_tokens, model.max_input_tokens, model.vocab_size, model.device, model.dtype)
    assert facts == (3, POSITIONS, POSITIONS - 1, VOCABULARY, "cpu", "float32")


def test_logits_come_as_float32_one_row_for_each_slot_that_was_named(zoo):
    reference = zoo.of_length("llama", 5)[0]
    model = serve(zoo.folder("llama"), max_batch_size=3)
    after_prompt = [model.prefill(slot, reference.prompt) for slot in range(3)]
    first = torch.tensor([reference.tokens[0]] * 2)
    rows = model.decode(first, torch.tensor([5, 5]), torch.tensor([0, 2]))
    assert [(tuple(row.shape), row.dtype) for row in after_prompt] == [((1, VOCABULARY), torch.float32)] * 3
    assert (tuple(rows.shape), rows.dtype) == ((2, VOCABULARY), torch.float32)
    with torch.inference_mode():
        expected = reference_model(zoo.folder("llama"))(torch.tensor([[*reference.prompt, reference.tokens[0]]])).logits[0]
    torch.testing.assert_close(after_prompt[1], expected[4:5], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows, expected[5].expand(2, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [3, 128], ids=["in parts", "whole"])
@pytest.mark.parametrize("family", tiny_models.ALL)
def test_a_scored_prompt_has_transformers_logits_and_goes_on_as_a_prefilled_one(zoo, family, chunk, monkeypatch):
    monkeypatch.setattr(torch_model, "SCORE_CHUNK", chunk)
    model = zoo.served(family, 4)
    assert model.gives_prompt_logits
    expected = reference_model(zoo.folder(family))
    for reference in zoo.references(family):
        batch = Batch(model)
        text, logits = batch.join_scored(reference)
        with torch.inference_mode():
            torch.testing.assert_close(logits, expected(torch.tensor([reference.prompt])).logits[0], rtol=1e-4, atol=1e-4)
        batch.run()
        assert text.tokens == reference.tokens


@each_family
def test_scoring_changes_no_neighbour_and_finds_nothing_of_who_was_there(zoo, family, monkeypatch):
    monkeypatch.setattr(torch_model, "SCORE_CHUNK", 5)  # 16 = 5 + 5 + 5 + 1, 11 = 5 + 5 + 1
    first, second, scored, scored_again = references = zoo.of_length(family, 5, 2, 16, 11)
    batch = Batch(serve(zoo.folder(family), max_batch_size=3))
    texts = [batch.join(first), batch.join(second)]
    batch.steps(4)
    texts.append(batch.join_scored(scored)[0])
    batch.steps(3)
    batch.leave(texts[2])
    texts.append(batch.join_scored(scored_again)[0])
    batch.run()
    lengths = [len(first.tokens), len(second.tokens), 4, len(scored_again.tokens)]
    assert [text.tokens for text in texts] == [reference.tokens[:n] for reference, n in zip(references, lengths)]


def test_the_logits_of_a_prompt_come_in_parts_of_bounded_size(zoo, monkeypatch):
    monkeypatch.setattr(torch_model, "SCORE_CHUNK", 3)
    parts = list(zoo.served("llama", 4).score(1, list(range(10))))
    assert [(tuple(part.shape), part.dtype) for part in parts] == [((n, VOCABULARY), torch.float32) for n in (3, 3, 2, 2)]


@pytest.mark.parametrize("failure", ["other logits", "an exception"])
def test_a_model_that_cannot_run_a_prompt_in_parts_is_served_without_prompt_logits(zoo, failure, monkeypatch, caplog):
    run_prompt = torch_model.TorchModel._run_prompt

    def fails_in_parts(self, slot, ids, begin, logits_to_keep):
        if begin > 0 and failure == "an exception":
            raise RuntimeError("only whole prompts")
        return run_prompt(self, slot, ids, begin, logits_to_keep) + begin

    monkeypatch.setattr(torch_model.TorchModel, "_run_prompt", fails_in_parts)
    reference = zoo.of_length("llama", 5)[0]
    model = serve(zoo.folder("llama"))
    assert not model.gives_prompt_logits
    assert "llama models cannot run a prompt in parts" in caplog.text
    assert continued(model, reference) == reference.tokens


@pytest.mark.parametrize("family", tiny_models.FAMILIES | tiny_models.WITH_THEIR_OWN_ATTENTION)
def test_bfloat16_is_near_and_its_logits_come_as_float32(zoo, family):
    reference = zoo.of_length(family, 16)[0]
    exact, rounded = (serve(zoo.folder(family), dtype=dtype) for dtype in ("float32", "bfloat16"))
    after_prompt = [model.prefill(0, reference.prompt) for model in (exact, rounded)]
    step = torch.tensor([[reference.tokens[0]], [16], [0]])
    after_step = [model.decode(*step)[0] for model in (exact, rounded)]
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")
    for expected, found in (after_prompt, after_step):
        assert found.dtype == torch.float32
        assert 0 < (found - expected).abs().max() < 0.15 * expected.abs().max()


LIKE_LLAMA = ["llama", "llama-3", "llama-yarn", "mistral", "qwen2", "qwen2-sliding"]
packs = pytest.mark.skipif(not decoder.can_pack(torch.float32), reason="this torch has no packed kernels for this CPU")


@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_a_model_built_like_llama_runs_without_transformers_and_its_weights_are_there_once(zoo, family):
    model = zoo.served(family, 4)
    assert model._decoder is not None
    assert model._model is None and model._cache is None


@packs
@pytest.mark.parametrize("family", sorted(tiny_models.ALL.keys() - {*LIKE_LLAMA, "llama-linear", "llama-dynamic"}))
def test_any_other_model_has_its_linear_layers_packed(zoo, family):
    kinds = [type(module).__name__ for module in zoo.served(family, 4)._model.modules()]
    assert "Packed" in kinds
    assert not {"Linear", "Conv1D"} & set(kinds)


@packs
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@given(
    shape=st.lists(st.integers(0, 20), max_size=2),
    inside=st.integers(1, 130),
    outside=st.integers(1, 130),
    has_bias=st.booleans(),
)
def test_a_packed_layer_gives_what_the_plain_one_does(dtype, tolerance, shape, inside, outside, has_bias):
    random = torch.Generator().manual_seed(inside)
    weight, bias, x = (torch.randn(s, generator=random).to(dtype) for s in ((outside, inside), outside, (*shape, inside)))
    layer = torch.nn.functional.linear(x, weight, bias if has_bias else None)
    packed = decoder.Packed(weight, bias if has_bias else None)(x)
    assert packed.shape == layer.shape
    torch.testing.assert_close(packed, layer, rtol=tolerance, atol=tolerance * inside**0.5)


few = pytest.mark.skipif(
    not decoder.multiplies_few(torch.bfloat16), reason="this CPU has no instruction for products of bfloat16, or more"
)


@few
@given(inside=st.integers(1, 700), outside=st.integers(1, 300))
def test_a_few_rows_are_multiplied_by_our_kernel_where_it_can_read_what_onednn_packed(inside, outside):
    random = torch.Generator().manual_seed(inside)
    weight, x = (torch.randn(s, generator=random).bfloat16() for s in ((outside, inside), (2 * decoder.FEW_ROWS, inside)))
    layer = decoder.Packed(weight, None)
    assert layer.few == (0 if inside % 2 else decoder.FEW_ROWS)
    alone, few, many = layer(x[:1]), layer(x[: decoder.FEW_ROWS]), layer(x)
    assert inside % 2 or torch.equal(alone, few[:1])
    torch.testing.assert_close(few, many[: decoder.FEW_ROWS], rtol=0.01, atol=0.01 * inside**0.5)


@few
@pytest.mark.parametrize("changed", ["as many bytes", "the order"])
def test_what_onednn_packed_in_another_way_is_left_to_it(changed, monkeypatch):
    weight, x = torch.randn(128, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    if changed == "as many bytes":
        monkeypatch.setattr(decoder, "packed_bytes", lambda outside, depth: 4 * outside * depth + 64)
    else:
        kernel = decoder.Packed._multiply
        monkeypatch.setattr(decoder.Packed, "_multiply", lambda self, x: kernel(self, x).roll(1, 1))
    layer = decoder.Packed(weight, None)
    assert layer.few == 0
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight), rtol=0.01, atol=0.1)


@packs
@pytest.mark.parametrize("form", [decoder.Packed, decoder.Int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_need_not_lie_side_by_side(form, dtype):
    forward = form(torch.randn(80, 64).to(dtype), None).forward
    wide, deep = torch.randn(6, 128).to(dtype), torch.randn(2, 5, 64).to(dtype)
    for x in (wide[:, 64:], wide[::2, :64], wide.view(6, 2, 64)[:, 1], deep[:, -1:], deep.transpose(0, 1), deep[:, ::2]):
        assert torch.equal(forward(x), forward(x.contiguous()))


@packs
@pytest.mark.parametrize(("slots", "pays"), [(1, True), (1, False), (2, False)])
def test_a_single_slot_takes_the_form_that_is_faster_for_a_single_row(zoo, slots, pays, monkeypatch):
    """Of two slots each may have company, so that their rows need kernels that do the same for any number."""
    monkeypatch.setattr(torch_model, "packing_pays", lambda weights: pays)
    reference = zoo.of_length("llama", 5)[0]
    model = serve(zoo.folder("llama"), max_batch_size=slots)
    assert isinstance(getattr(model._decoder._head, "__self__", None), decoder.Packed) == (pays or slots > 1)
    assert continued(model, reference) == reference.tokens


@packs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_form_is_faster_can_be_told_of_any_weights(dtype):
    assert decoder.packing_pays([torch.ones(64, 32, dtype=dtype), torch.ones(5, 64, dtype=dtype)]) in (True, False)


@each_family
def test_a_machine_without_packed_kernels_serves_the_same(zoo, family, monkeypatch):
    monkeypatch.setattr(torch_model, "can_pack", lambda dtype: False)
    references = zoo.of_length(family, 11, 5)
    batch = Batch(serve(zoo.folder(family), max_batch_size=2))
    texts = [batch.join(reference) for reference in references]
    batch.run()
    assert [text.tokens for text in texts] == [reference.tokens for reference in references]


@pytest.mark.parametrize("where", ["", "AVX2 is as far as it goes"], ids=["no oneDNN", "no such kernel"])
def test_missing_kernels_are_noticed_and_no_error(where, monkeypatch):
    def missing(*_):
        raise RuntimeError(where)

    monkeypatch.setattr(decoder, "_packed_linear", missing if where else None)
    assert not decoder.can_pack(torch.float32)


@packs
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_weights_that_give_other_logits_are_not_used(zoo, family, monkeypatch, caplog):
    forward = decoder.Packed.forward
    monkeypatch.setattr(decoder.Packed, "forward", lambda self, x: forward(self, x) * 1.1)
    monkeypatch.setattr(torch_model, "can_pack", lambda dtype: True)
    reference = zoo.of_length(family, 5)[0]
    assert continued(serve(zoo.folder(family)), reference) == reference.tokens
    assert "packed for this CPU, it gives other logits" in caplog.text


@pytest.mark.parametrize(
    "changes", [{}, {"residual_multiplier": 0.5}, {"embedding_multiplier": 3.0}, {"logits_scaling": 2.0}], ids=str
)
def test_what_only_looks_like_llama_is_left_to_transformers(tmp_path, changes):
    folder = save_checkpoint(tmp_path, transformers.GraniteConfig(**tiny_models.GROUPED | changes))
    reference = next(clear_cut(reference_model(folder), 5, torch.Generator().manual_seed(1)))
    model = serve(folder)
    assert (model._decoder is None) == bool(changes)
    assert continued(model, reference) == reference.tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 6},
    ],
    ids=str,
)
def test_variants_of_llama_give_the_tokens_of_transformers(tmp_path, changes):
    folder = save_checkpoint(tmp_path, tiny_models.llama(**changes))
    reference = next(clear_cut(reference_model(folder), 5, torch.Generator().manual_seed(1)))
    model = serve(folder)
    assert model._decoder is not None
    assert continued(model, reference) == reference.tokens


def test_heads_that_are_turned_in_part_and_layers_that_differ_do_not_suit(zoo):
    """Kernels take sizes as they are told, and look no further."""
    model = reference_model(zoo.folder("llama"))
    assert decoder.Decoder.suits(model)
    angles = model.model.rotary_emb.inv_freq
    model.model.rotary_emb.inv_freq = angles[:-1]
    assert not decoder.Decoder.suits(model)
    model.model.rotary_emb.inv_freq = angles
    wide = torch.nn.Linear(48, 80, bias=False)
    model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj = wide, wide
    assert not decoder.Decoder.suits(model)


def logits_of_everything(model) -> torch.Tensor:
    """Those of prompts as a whole and in parts, and of steps at all positions, full and with free slots: [many, vocab]."""
    tokens = list(range(20))
    logits = [model.prefill(2, tokens[:7]), model.prefill(0, tokens[:1]), model.prefill(1, tokens), *model.score(1, tokens)]
    for at in range(3):
        logits.append(model.decode(*torch.tensor([(5 + at, 1 + at, 0), (5 + at, 20 + at, 1), (9, 7 + at, 2)]).T))
    logits.append(model.decode(torch.tensor([3]), torch.tensor([23]), torch.tensor([1])))
    return torch.cat([told.view(-1, model.vocab_size) for told in logits])


@pytest.mark.parametrize("family", LIKE_LLAMA)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.15)])
def test_kernels_give_the_logits_of_torchs_own_calls(zoo, family, dtype, tolerance):
    model = serve(zoo.folder(family), dtype=dtype, max_batch_size=3)
    between = model._decoder._between
    assert type(between) is decoder.Compiled
    found, model._decoder._between = logits_of_everything(model), decoder.Plain(between._activation)
    torch.testing.assert_close(found, logits_of_everything(model), rtol=0, atol=tolerance * found.abs().max().item())


@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_a_type_of_number_without_kernels_runs_in_torchs_own_calls(zoo, family):
    rounded, exact = (serve(zoo.folder(family), dtype=dtype, max_batch_size=3) for dtype in ("float16", "float32"))
    assert type(rounded._decoder._between) is decoder.Plain
    expected = logits_of_everything(exact)
    torch.testing.assert_close(logits_of_everything(rounded), expected, rtol=0, atol=0.03 * expected.abs().max().item())


def test_what_differs_from_llama_in_long_texts_alone_is_left_to_transformers(tmp_path):
    rope = tiny_models.rope(llama_4_scaling_beta=4.0, original_max_position_embeddings=POSITIONS // 2 + 1)
    folder = save_checkpoint(
        tmp_path, transformers.Ministral3Config(**tiny_models.GROUPED | {"head_dim": 12, "rope_parameters": rope})
    )
    reference = next(clear_cut(reference_model(folder), 5, torch.Generator().manual_seed(1)))
    model = serve(folder)
    assert model._decoder is None
    assert continued(model, reference) == reference.tokens
    assert serve(folder, max_total_tokens=POSITIONS // 2 + 1)._decoder is not None


@pytest.mark.parametrize("family", tiny_models.FAMILIES | tiny_models.WITH_THEIR_OWN_ATTENTION)
@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_a_long_prompt_runs_in_parts(zoo, family, chunk, monkeypatch):
    model = zoo.served(family, 4)
    monkeypatch.setattr(torch_model, "PREFILL_CHUNK", chunk)
    widest = []
    run_prompt = torch_model.TorchModel._run_prompt
    monkeypatch.setattr(
        torch_model.TorchModel,
        "_run_prompt",
        lambda self, slot, ids, begin, logits_to_keep: (
            widest.append(len(ids)) or run_prompt(self, slot, ids, begin, logits_to_keep)
        ),
    )
    for reference in zoo.of_length(family, 16, 1, 11):
        assert continued(model, reference) == reference.tokens
    assert max(widest) == chunk


@pytest.mark.parametrize("family", tiny_models.FAMILIES | tiny_models.WITH_THEIR_OWN_ATTENTION)
def test_steps_of_others_between_the_parts_of_a_prompt_change_neither(zoo, family, monkeypatch):
    monkeypatch.setattr(torch_model, "PREFILL_CHUNK", 3)
    model = zoo.served(family, 4)
    long, other = zoo.of_length(family, 16, 5)
    tokens = [int(model.prefill(2, other.prompt).argmax())]
    for begin, end in parts_of(long.prompt, 3):
        logits = model.prefill_part(Part(1, long.prompt, begin, end))
        step = model.decode(torch.tensor([tokens[-1]]), torch.tensor([4 + len(tokens)]), torch.tensor([2]))
        tokens.append(int(step[0].argmax()))
    ids = [int(logits.argmax())]
    while len(ids) < len(long.tokens):
        ids.append(int(model.decode(torch.tensor([ids[-1]]), torch.tensor([15 + len(ids)]), torch.tensor([1]))[0].argmax()))
    assert ids == long.tokens
    assert tokens[: len(other.tokens)] == other.tokens[: len(tokens)]


@packs
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_prompt_may_go_along_with_the_steps_of_others_which_changes_not_a_bit(zoo, quantize):
    """In parts of any size, in a slot above theirs, below, or between."""
    if not (decoder.multiplies_few(torch.bfloat16) and decoder.multiplies_few(torch.int8)):
        pytest.skip("this CPU has no kernels of ours for a few rows")
    model = serve(zoo.folder("llama"), max_batch_size=4, dtype="bfloat16", quantize=quantize)
    assert model.most_along == 128 - 4
    long, *others = zoo.of_length("llama", 16, 5, 11)
    prompt, positions = long.prompt, torch.tensor([len(other.prompt) for other in others])
    alone = model.prefill(0, prompt)
    tokens, steps = torch.tensor([other.tokens[0] for other in others]), {}
    for slot, named in (3, [0, 2]), (1, [0, 2]), (0, [1, 3]):
        for cut in ([0, 16], [0, 7, 9, 16], [0, 2, 14, 16]):
            for other, own in zip(others, named):
                model.prefill(own, other.prompt)
            for begin, end in itertools.pairwise(cut):
                along, after = model.decode_along(tokens, positions, torch.tensor(named), Part(slot, prompt, begin, end))
                steps.setdefault("along", along)
                assert torch.equal(along, steps["along"])
            assert torch.equal(after, alone)
            step = model.decode(tokens, positions, torch.tensor(named))
            assert torch.equal(step, steps["along"])
            following = model.decode(torch.tensor([9]), torch.tensor([16]), torch.tensor([slot]))
            assert torch.equal(following, steps.setdefault("following", following))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_where_kernels_tell_each_token_by_itself_does_a_prompt_go_along(zoo, dtype):
    goes_along = dtype == "bfloat16" and decoder.multiplies_few(torch.bfloat16)
    assert bool(serve(zoo.folder("llama"), dtype=dtype).most_along) == goes_along
    assert serve(zoo.folder("gpt2"), dtype=dtype).most_along == 0
    assert serve(zoo.folder("llama"), max_batch_size=128, dtype=dtype).most_along == 0


@given(length=st.integers(1, 2000), most=st.integers(3, 300) | st.none(), begin=st.integers(0, 1998))
def test_the_parts_of_a_prompt_follow_each_other_and_none_is_a_single_token(length, most, begin):
    prompt = [1] * (begin + length)
    parts = list(parts_of(prompt, most, begin))
    assert parts[0][0] == begin and parts[-1][1] == begin + length
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert all(end - begin <= (most or length) for begin, end in parts)
    assert length == 1 or all(end - begin > 1 for begin, end in parts)


IN_EACH_TYPE = [
    (family, dtype, None) for family in ("llama", "wide-llama", "mistral", "gpt2") for dtype in ("float32", "bfloat16")
]
IN_EACH_TYPE += [(family, dtype, "int8") for family in ("llama", "wide-llama", "qwen2") for dtype in ("float32", "bfloat16")]


@packs
@pytest.mark.parametrize(("family", "dtype", "quantize"), IN_EACH_TYPE)
def test_company_does_not_change_a_single_bit(zoo, family, dtype, quantize, tmp_path):
    if quantize and not decoder.can_quantize(torch.float32):
        pytest.skip("this torch has no int8 kernels for this CPU")
    is_wide = family == "wide-llama"  # sums so long that a kernel for one row would split them
    folder = save_checkpoint(tmp_path, tiny_models.llama(intermediate_size=2048)) if is_wide else zoo.folder(family)
    references = zoo.of_length("llama" if is_wide else family, 5, 1, 16, 11)
    model = serve(folder, max_batch_size=4, dtype=dtype, quantize=quantize)
    position = torch.tensor([len(reference.prompt) for reference in references])
    token = torch.tensor([reference.tokens[0] for reference in references])
    alone = []
    for i, reference in enumerate(references):
        model.prefill(0, reference.prompt)
        alone.append(model.decode(token[i : i + 1], position[i : i + 1], torch.tensor([0]))[0])
    for slot, reference in enumerate(references):
        model.prefill(slot, reference.prompt)
    together = model.decode(token, position, torch.arange(4))
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noughts_are_of_their_type_and_shape_and_can_be_written(dtype):
    noughts = decoder.zeros((2, 3, 5), dtype, torch.device("cpu"))
    assert (noughts.shape, noughts.dtype) == ((2, 3, 5), dtype) and noughts.is_contiguous() and not noughts.any()
    noughts[1, 2] = 1.0
    assert noughts.sum() == 5.0


quantizes = pytest.mark.skipif(not decoder.can_quantize(torch.float32), reason="this torch has no int8 kernels for this CPU")


@quantizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(rows=st.integers(1, 9), inside=st.integers(1, 130), outside=st.integers(1, 130), has_bias=st.booleans())
def test_a_layer_in_int8_is_off_by_no_more_than_the_two_roundings(dtype, rows, inside, outside, has_bias):
    random = torch.Generator().manual_seed(inside)
    weight, bias, x = (torch.randn(s, generator=random).to(dtype) for s in ((outside, inside), outside, (rows, inside)))
    bias = bias if has_bias else None
    found = decoder.Int8(weight, bias).forward(x).float()
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    # Half a step of a weight times the token, half a step of the token times the weights, and the type's own rounding.
    of_weights = weight.float().abs().amax(1) / 254 * x.float().abs().sum(1, keepdim=True)
    of_tokens = (
        x.float().abs().amax(1, keepdim=True) / 254 * (weight.float().abs() + weight.float().abs().amax(1, True) / 254).sum(1)
    )
    own = 4 * torch.finfo(dtype).eps * (exact.abs() + of_weights + of_tokens + 1)
    assert ((found - exact).abs() <= 1.01 * (of_weights + of_tokens) + own).all()


@quantizes
@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this CPU has no instructions for int8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_not_left_to_kernels_that_are_there_for_comparison(dtype, capfd):
    layer, inputs = decoder.Int8(torch.ones(64, 48), None), [torch.ones(rows, 48, dtype=dtype) for rows in (1, 2, 16, 128)]
    layer.few = 0  # for these there is one of ours, on some CPUs
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for x in inputs:
            layer.forward(x)
    products = [line.split(",") for line in capfd.readouterr().out.splitlines() if ",exec,cpu,matmul," in line]
    assert len(products) == len(inputs)
    assert not [line for line in products if any(word.startswith("ref") for word in line)], products


@quantizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data(), rows=st.integers(2, 40), inside=st.integers(1, 130), loudest=st.sampled_from([1e-3, 1.0, 1e4]))
def test_a_row_in_int8_does_not_depend_on_its_company(dtype, data, rows, inside, loudest):
    random = torch.Generator().manual_seed(rows)
    layer = decoder.Int8(torch.randn(70, inside, generator=random), None)
    x = torch.randn(rows, inside, generator=random)
    x[data.draw(st.integers(0, rows - 1))] *= loudest
    x = x.to(dtype)
    assert torch.equal(layer.forward(x), torch.cat([layer.forward(x[i : i + 1]) for i in range(rows)]))


@quantizes
@pytest.mark.parametrize("what", [0.0, float("nan"), float("inf")])
def test_a_row_of_noughts_or_of_no_numbers_in_int8_changes_no_other(what):
    layer = decoder.Int8(torch.randn(20, 30, generator=torch.Generator().manual_seed(1)), None)
    x = torch.ones(3, 30)
    expected = layer.forward(x)
    x[1] = what
    found = layer.forward(x)
    assert torch.equal(found[::2], expected[::2])
    if what == 0.0:
        assert not found[1].any()
    else:
        assert not found[1].isfinite().any()


@quantizes
@pytest.mark.parametrize(("family", "dtype"), [*((family, "float32") for family in LIKE_LLAMA), ("llama", "bfloat16")])
def test_a_model_in_int8_is_near_and_says_so(zoo, family, dtype):
    reference = zoo.of_length(family, 16)[0]
    exact, rounded = serve(zoo.folder(family), dtype=dtype), serve(zoo.folder(family), dtype=dtype, quantize="int8")
    assert (exact.quantize, rounded.quantize, rounded.dtype) == (None, "int8", dtype)
    after_prompt = [model.prefill(0, reference.prompt) for model in (exact, rounded)]
    step = torch.tensor([[reference.tokens[0]], [16], [0]])
    after_step = [model.decode(*step)[0] for model in (exact, rounded)]
    for expected, found in (after_prompt, after_step):
        assert found.dtype == torch.float32
        assert 0 < (found - expected).abs().max() < 0.25 * expected.abs().max()


@quantizes
@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_int8_is_refused_for_models_that_are_not_built_like_llama(zoo, family):
    message = refusal(zoo.folder(family), device="cpu", quantize="int8")
    told = f"on a CPU it is for models built like Llama, not for {family}; none would work"
    assert message == f"--quantize int8 (QUANTIZE): {told}"


def test_int8_is_refused_where_torch_has_no_kernels_for_it(zoo, monkeypatch):
    monkeypatch.setattr(decoder, "_int8_linear", None)
    message = refusal(zoo.folder("llama"), device="cpu", quantize="int8")
    assert message == "--quantize int8 (QUANTIZE): torch has no int8 kernels for float32 on this CPU; none would work"


@quantizes
def test_int8_that_gives_quite_other_logits_is_refused(zoo, monkeypatch):
    forward = decoder.Int8.forward
    monkeypatch.setattr(decoder.Int8, "forward", lambda self, x: forward(self, x).roll(1, -1))
    monkeypatch.setattr(torch_model, "can_quantize", lambda dtype: True)
    assert "the logits of this llama model would differ by" in refusal(zoo.folder("llama"), device="cpu", quantize="int8")


@pytest.mark.parametrize("can_multiply", [True, False])
@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
def test_a_cpu_computes_in_bfloat16_where_it_and_the_checkpoint_do_and_else_in_float32(
    tmp_path, saved, can_multiply, monkeypatch
):
    monkeypatch.setattr(torch_model, "multiplies_bfloat16", lambda: can_multiply)
    folder = save_checkpoint(tmp_path, tiny_models.llama(), dtype=getattr(torch, saved))
    expected = "bfloat16" if saved == "bfloat16" and can_multiply else "float32"
    assert serve(folder).dtype == expected
    assert serve(folder, dtype="bfloat16").dtype == "bfloat16"


def test_whether_this_cpu_multiplies_bfloat16_can_be_told():
    flags = Path("/proc/cpuinfo").read_text()
    expected = ("avx512_bf16" in flags or "amx_tile" in flags) and torch.backends.mkldnn.is_available()
    assert decoder.multiplies_bfloat16() == expected


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}])
def test_checkpoints_of_transformers_4_and_5_give_the_same_tokens(tmp_path, scaling):
    new_rope = tiny_models.rope() if scaling is None else tiny_models.rope(rope_type="linear", factor=2.0)
    new = save_checkpoint(tmp_path / "new", tiny_models.llama(rope_parameters=new_rope))
    old, other = (save_checkpoint(tmp_path / name, tiny_models.llama(rope_parameters=new_rope)) for name in ("old", "other"))
    written = json.loads((new / "config.json").read_text())
    assert "rope_parameters" in written and "dtype" in written and "rope_theta" not in written
    form = {"rope_scaling": scaling, "torch_dtype": "float32", "transformers_version": "4.48.3"}
    edit_config(old, remove=("rope_parameters", "dtype"), rope_theta=tiny_models.ROPE_THETA, **form)
    edit_config(other, remove=("rope_parameters", "dtype"), rope_theta=10000.0, **form)

    reference = next(clear_cut(reference_model(new), 5, torch.Generator().manual_seed(1)))
    tokens = {folder.name: continued(serve(folder), reference) for folder in (new, old, other)}

    assert tokens["new"] == tokens["old"] == reference.tokens
    assert tokens["other"] != tokens["new"]


def refusal(folder, **changes) -> str:
    """The one line that a person reads who wants to serve `folder`."""
    with pytest.raises(ModelError) as caught:
        serve(folder, **changes)
    message = str(caught.value)
    assert message.strip() and "\n" not in message
    return message


def test_an_encoder_decoder_is_refused(tmp_path):
    transformers.T5Config(vocab_size=VOCABULARY, n_positions=POSITIONS).save_pretrained(tmp_path)
    assert refusal(tmp_path) == "t5 models do not continue text token by token (no causal language model); nothing to serve"


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    transformers.ViTConfig().save_pretrained(tmp_path)
    assert "vit models do not continue text" in refusal(tmp_path)


UNFIT = {
    "bert": lambda: transformers.BertConfig(**tiny_models.GROUPED | {"pad_token_id": 0}),
    "mamba": lambda: transformers.MambaConfig(
        **tiny_models.NO_SPECIAL_TOKENS, hidden_size=48, num_hidden_layers=2, state_size=8
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        **tiny_models.SMALL | {"num_layers": 2, "num_heads": 4},
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **tiny_models.GROUPED,
        head_dim=12,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "bloom": lambda: transformers.BloomConfig(**tiny_models.NO_SPECIAL_TOKENS, hidden_size=48, n_head=4, n_layer=2),
    "rwkv": lambda: transformers.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, context_length=POSITIONS
    ),
    "lfm2": lambda: transformers.Lfm2Config(**tiny_models.GROUPED, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("family", UNFIT)
def test_a_family_that_slots_cannot_share_is_refused(tmp_path, family):
    """BERT looks ahead; Mamba, RWKV and LFM2 keep a state; gpt-oss has sinks; GPT-Neo's window, BLOOM's bias are their own."""
    folder = save_checkpoint(tmp_path, UNFIT[family]())
    assert "static batch" in refusal(folder)


@pytest.mark.parametrize("family", ["mamba", "bloom", "lfm2"])
def test_a_family_that_cannot_even_run_in_slots_is_named(tmp_path, family):
    folder = save_checkpoint(tmp_path, UNFIT[family]())
    message = refusal(folder)
    assert f"{family} model" in message and "static batch" in message


def test_a_window_that_the_attention_is_not_told_of_is_refused_where_it_would_have_to_slide(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    edit_config(folder, sliding_window=tiny_models.SLIDING)
    assert "give --max-total-tokens 8 or less" in refusal(folder)
    assert serve(folder, max_total_tokens=tiny_models.SLIDING).max_total_tokens == tiny_models.SLIDING


def test_attention_in_chunks_is_refused_by_name(tmp_path):
    config = transformers.Llama4TextConfig(
        **tiny_models.GROUPED | {"attention_chunk_size": POSITIONS // 2, "head_dim": 12, "intermediate_size_mlp": 64},
        num_local_experts=2,
    )
    folder = save_checkpoint(tmp_path, config)
    assert refusal(folder) == "llama4_text models with chunked_attention layers cannot be served on a static batch yet"


def test_a_folder_without_weights_is_refused(tmp_path):
    tiny_models.llama().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle is never read")
    assert refusal(tmp_path) == f"{tmp_path} holds no weights (*.safetensors)"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite_header(path: Path) -> None:
    path.write_bytes(b"<!doctype html>" + path.read_bytes()[15:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, overwrite_header, empty])
def test_a_damaged_weights_file_is_refused(tmp_path, damage):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    damage(folder / "model.safetensors")
    assert refusal(folder).startswith(f"{folder} cannot be loaded: SafetensorError: ")


def test_a_checkpoint_that_lacks_a_shard_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    os.rename(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(weights, "model-00001-of-00002.safetensors") | {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_and_the_tensor_named(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(folder) == f"{folder} lacks 1 of its weights, model.layers.1.mlp.up_proj.weight among them"


def test_a_checkpoint_with_a_tensor_of_another_shape_is_refused_and_the_tensor_named(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(40)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(folder)


def test_an_unknown_model_type_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama7000"}))
    assert "llama7000" in refusal(tmp_path)


def test_a_quantized_checkpoint_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, tiny_models.llama())
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False})
    assert "this llama checkpoint is quantized" in refusal(folder)


@pytest.mark.parametrize("form", ["new", "old"])
def test_positions_that_stretch_with_the_longest_text_are_refused_beyond_what_they_were_trained_for(tmp_path, form):
    rope = tiny_models.rope(rope_type="dynamic", factor=2.0)
    folder = save_checkpoint(tmp_path, tiny_models.llama(rope_parameters=rope, max_position_embeddings=POSITIONS // 2))
    if form == "old":
        old_rope = {"type": "dynamic", "factor": 2.0}
        edit_config(folder, remove=("rope_parameters",), rope_theta=tiny_models.ROPE_THETA, rope_scaling=old_rope)
    manifest = Manifest.read(folder)
    config = Config(model_id=str(folder), device="cpu", max_total_tokens=POSITIONS // 2 + 1, max_input_tokens=POSITIONS // 2)
    with pytest.raises(ModelError, match=f"give --max-total-tokens {POSITIONS // 2} or less"):
        torch_model.TorchModel(config, folder, manifest, "cpu")
    assert serve(folder, max_total_tokens=POSITIONS // 2).max_total_tokens == POSITIONS // 2


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "configuration_own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    assert "code" in refusal(tmp_path)
    assert not ran.exists()


def test_cuda_is_refused_where_there_is_none(zoo, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(zoo.folder("llama"), device="cuda")
    assert message == "--device cuda: torch sees no CUDA GPU on this machine; use --device cpu or auto"


@pytest.mark.parametrize(
    "setting",
    [{"tp_degree": 2}, {"prefill_buckets": (8,)}, {"position_buckets": (8,)}, {"compile_workers": 1}],
    ids=str,
)
def test_what_is_for_neuron_alone_is_refused_by_name_elsewhere(zoo, setting):
    (name,) = setting
    message = refusal(zoo.folder("llama"), device="cpu", **setting)
    assert message.startswith(f"--{name.replace('_', '-')} ({name.upper()}) is for Neuron")


def test_cuda_graphs_are_refused_where_there_is_no_gpu_unless_none_are_asked_for(zoo):
    told = "--cuda-graphs (CUDA_GRAPHS) is for CUDA GPUs, and this is served on cpu; leave it out"
    assert refusal(zoo.folder("llama"), device="cpu", cuda_graphs=(2, 4)) == told
    assert serve(zoo.folder("llama"), cuda_graphs=()).device == "cpu"


def test_sampling_on_the_device_is_refused_where_there_is_no_neuron_device(zoo):
    told = "--sampling device (SAMPLING) is for Neuron, and this is served on cpu; leave it out"
    assert refusal(zoo.folder("llama"), device="cpu", sampling="device") == told
    assert serve(zoo.folder("llama"), sampling="host").sampling == "host"


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, None),
        ({"HF_API_TOKEN": "older"}, "older"),
        ({"HF_API_TOKEN": ""}, None),
        ({"HF_API_TOKEN": "older", "HF_TOKEN": "newer"}, None),
        ({"HF_API_TOKEN": "older", "HUGGING_FACE_HUB_TOKEN": "newer"}, None),
    ],
    ids=str,
)
def test_the_older_name_of_the_hubs_token_counts_where_no_newer_one_is_given(environ, given, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model_id, **how: asked.append(how) or str(tmp_path))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert fetch(Config(model_id="someone/something")) == (tmp_path, tmp_path.name)
    assert [how["token"] for how in asked] == [given]


def saved_tokenizer(kind: str, folder: Path) -> Path:
    folder.mkdir()
    if kind == "byte-level-bpe":
        return tiny_models.save_byte_level_bpe(folder)
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed, so there is nothing to convert")
    return tiny_models.save_sentencepiece(folder)


@pytest.mark.parametrize("kind", ["byte-level-bpe", "sentencepiece"])
def test_a_slow_tokenizer_is_converted_to_one_that_does_the_same(tmp_path, kind):
    folder, target = saved_tokenizer(kind, tmp_path / "model"), tmp_path / "target"
    target.mkdir()
    convert_tokenizer(folder, target)
    slow, fast = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(target / "tokenizer.json"))
    end = slow.eos_token
    for text in [*tiny_models.TEXTS, " leading space", f"a{end}b{end}", "characters it has never seen: Ωж"]:
        ids = fast.encode(text).ids
        assert ids == slow(text)["input_ids"]
        assert fast.decode(ids) == slow.decode(ids, skip_special_tokens=True)
        assert fast.decode(ids, skip_special_tokens=False) == slow.decode(ids)
    assert [fast.decode(fast.encode(text).ids) for text in tiny_models.TEXTS] == tiny_models.TEXTS
    assert not (folder / "tokenizer.json").exists()


def test_a_converted_sentencepiece_tokenizer_agrees_with_sentencepiece_itself(tmp_path):
    folder, target = saved_tokenizer("sentencepiece", tmp_path / "model"), tmp_path / "target"
    target.mkdir()
    convert_tokenizer(folder, target)
    import sentencepiece

    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    fast = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert [fast.encode(text).ids for text in tiny_models.TEXTS] == [own.encode(t, add_bos=True) for t in tiny_models.TEXTS]


def test_a_tokenizer_is_converted_in_a_process_of_its_own(tmp_path):
    folder, target = saved_tokenizer("byte-level-bpe", tmp_path / "model"), tmp_path / "target"
    target.mkdir()
    command = [sys.executable, HERE / "model.py", folder, target]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout) == (0, "")
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("Hello").ids


def test_code_that_comes_with_a_tokenizer_is_not_run_and_nobody_is_asked_whether_it_may(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(ModelError):
        convert_tokenizer(tmp_path, tmp_path)
    assert not ran.exists()
    assert questions == []


def test_a_tokenizer_that_cannot_be_converted_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    with pytest.raises(ModelError) as caught:
        convert_tokenizer(tmp_path, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} cannot be read for its tokenizer: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer.json").exists()
