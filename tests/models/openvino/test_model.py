"""On OpenVINO, in any schedule, a slot generates what `transformers` alone generates, to the last bit what it generates alone;
which engine serves which family; and what happens where a model does not convert.

The checkpoints are tiny and random (`tiny_models`). They are converted in this process: the child process is tested once.
"""

import logging
import random
import re
from math import inf
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from fakes.tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import POSITIONS, VOCABULARY, edit_config, made_checkpoint, run, save_checkpoint, settings

import models.convert
from config import Config
from manifest import Manifest
from models.accuracy import kl_divergence
from models.base import Chunk
from models.cache import read_entry
from models.errors import ModelError
from models.openvino import OpenVino
from models.openvino import model as openvino_model
from models.openvino.check_text import ids_of_text

# The warnings are of torch, openvino and nncf, while converting.
pytestmark = [pytest.mark.models, pytest.mark.usefixtures("conversions"), pytest.mark.filterwarnings("ignore")]

IN_TORCH = ("gemma2", "falcon", "gpt-j", "mpt")


def serve(folder, max_total_tokens=POSITIONS, max_batch_size=32, **changes):
    """The model of a folder; converted unless a test has done so before."""
    config = settings(folder, max_total_tokens, max_batch_size=max_batch_size, **changes)
    return load(config, folder)


def load(config, folder):
    return models.load(OpenVino(config, folder, Manifest.read(folder)), lambda phase: None)


@pytest.mark.parametrize("family", IN_TORCH)
def test_an_attention_that_openvino_lacks_runs_in_plain_pytorch_with_a_warning(zoo, caplog, family):
    assert serve(zoo.folder(family)).engine == "torch"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "runs in plain PyTorch, slower: its " in warnings[0]


@pytest.mark.parametrize("family", [family for family in tiny_models.ALL if family not in IN_TORCH])
def test_openvino_gives_the_tokens_of_transformers_alone_and_in_any_schedule_to_the_last_bit(zoo, caplog, family):
    model, chosen = serve(zoo.folder(family)), zoo.references(family)
    assert model.engine == "openvino" and "slower" not in caplog.text
    alone = [run(model, [reference.prompt])[0] for reference in chosen]
    for sequence, reference in zip(alone, chosen):
        assert sequence.tokens == reference.tokens
        assert len(reference.prompt) + len(reference.tokens) == POSITIONS
    for seed, budget in enumerate((7, 16, None)):
        together = run(model, [reference.prompt for reference in chosen] * 3, seed, budget=budget)
        assert sum(sequence.tokens == own.tokens for sequence, own in zip(together, alone * 3)) > 3
        for sequence, own in zip(together, alone * 3):
            assert sequence.tokens == own.tokens[: len(sequence.tokens)]
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])


@pytest.fixture(scope="module")
def even():
    """A Llama with sums as long as those of usual models, and weights as even: those of the zoo do not bear bfloat16."""
    config = tiny_models.llama(hidden_size=768, intermediate_size=2048, num_hidden_layers=1, max_position_embeddings=300)
    return made_checkpoint(config, spread=0.05)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2-sliding", "float32"), ("even", "bfloat16")])
def test_one_to_all_rows_in_any_slots_change_no_bit(zoo, even, family, dtype):
    model, chance = (serve(even if family == "even" else zoo.folder(family), dtype=dtype, threads=2), random.Random(0))
    assert model.engine == "openvino"
    begin, token = 11, 3
    for slot in range(model.batch_size):
        model.forward([Chunk(slot, list(range(begin)), 0)])
    alone = model.forward([Chunk(0, [token], begin)])
    for company in range(model.batch_size):
        own, *others = chance.sample(range(model.batch_size), company + 1)
        rows = [Chunk(slot, [chance.randrange(VOCABULARY)], chance.randrange(11, POSITIONS)) for slot in others]
        found = model.forward([*rows, Chunk(own, [token], begin)])
        assert found.shape == (company + 1, VOCABULARY)
        assert np.array_equal(found[-1:], alone)


@pytest.mark.parametrize(
    ("dtype", "quantize"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
def test_chunks_of_any_length_but_one_change_no_bit(even, dtype, quantize):
    """On two threads. (A chunk of one token runs as a decode step does.)"""
    model = serve(even, 300, threads=2, dtype=dtype, quantize=quantize, max_batch_size=4)
    assert model.engine == "openvino"
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 290).tolist()
    whole = model.forward([Chunk(0, prompt[:256], 0, all_logits=True)])
    for sizes in ((2, 5, 3), (31, 33, 2), (64, 7, 100), (128,)):
        for others in (0, 3):
            found, begin, turn = [], 0, 0
            while begin < 256:
                end = min(begin + sizes[turn % len(sizes)], 256)
                end -= 256 - end == 1
                rows = [Chunk(1 + slot, [slot], turn) for slot in range(others)]
                found.append(model.forward([*rows, Chunk(0, prompt[begin:end], begin, all_logits=True)])[others:])
                begin, turn = end, turn + 1
            assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize(
    ("kind", "dtype", "quantize"),
    [
        ("u8", "float32", None),
        ("u8", "bfloat16", None),
        ("u8", "bfloat16", "int8"),
        ("auto", "bfloat16", "int8"),
        ("float32", "bfloat16", "int8"),
    ],
)
def test_with_a_kv_cache_of_any_type_a_slot_generates_in_any_schedule_what_it_generates_alone(even, kind, dtype, quantize):
    """Prompts that begin alike, in chunks, with copied prefixes, beside others."""
    model = serve(even, 300, threads=2, dtype=dtype, quantize=quantize, kv_cache_dtype=kind, max_batch_size=6)
    assert (model.engine, model.verify_length > 0) == ("openvino", kind != "u8")
    assert kind in ("auto", model.kv_cache_dtype)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 280).tolist()
    prompts = [ids[:length] for length in (270, 33, 97, 65, 200)] + [[*ids[:100], 5, *ids[150:200]], [7, 8]]
    alone = [run(model, [prompt], new_tokens=12)[0] for prompt in prompts]
    for seed, budget in enumerate((40, 100, None)):
        together = run(model, prompts * 2, seed, budget=budget, new_tokens=12)
        for sequence, own in zip(together, alone * 2):
            assert sequence.tokens == own.tokens[: len(sequence.tokens)]
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])


def test_a_kv_cache_of_eight_bits_is_smaller_and_close_to_the_exact_one(even):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 290).tolist()
    logits, sizes = [], []
    for kind in ("auto", "u8"):
        model = serve(even, 300, dtype="float32", kv_cache_dtype=kind, max_batch_size=1)
        logits.append(model.forward([Chunk(0, ids[:256], 0, all_logits=True)]))
        sizes.append(model.kv_bytes_per_token)
    assert sizes[1] <= 0.32 * sizes[0]
    assert sizes[0] == Manifest.read(even).kv_bytes
    assert 0 < np.abs(logits[1] - logits[0]).max() < 0.02 * np.ptp(logits[0])


@pytest.mark.parametrize("speculate", [None, 3])
def test_a_kv_cache_of_eight_bits_speculates_only_if_it_is_asked_to(even, speculate):
    model = serve(even, 300, kv_cache_dtype="u8", speculate=speculate)
    assert bool(model.verify_length) == bool(speculate)


def test_slots_beyond_the_batch_hold_prompts_and_change_no_bit(even):
    model = serve(even, 300, threads=2, max_batch_size=2, prefix_slots=9)
    assert (model.batch_size, model.prefix_slots) == (2, 9)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 280).tolist()
    prompts = [ids[begin : begin + 30] for begin in range(0, 270, 30)]
    alone = [run(model, [prompt], new_tokens=5)[0] for prompt in prompts]
    for sequence, own in zip(run(model, prompts * 3, 1, new_tokens=5), alone * 3):
        assert sequence.tokens == own.tokens[: len(sequence.tokens)]
        assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kv_cache_that_the_arithmetic_does_not_take_is_refused_by_name(even, dtype):
    own = serve(even, dtype=dtype, threads=2).computed_in  # not every CPU multiplies bfloat16
    other = "bfloat16" if own == "float32" else "float32"
    refusal = f"^--kv-cache-dtype {other} .* in {own} here, which takes a KV cache in {own} or u8; "
    with pytest.raises(ModelError, match=refusal):
        serve(even, dtype=dtype, threads=2, kv_cache_dtype=other)


def test_compressed_weights_keep_the_kv_cache_in_the_type_of_the_checkpoint(even):
    plain = serve(even, dtype="bfloat16", threads=2)
    compressed = serve(even, dtype="bfloat16", threads=2, quantize="int8")
    assert (compressed.computed_in, compressed.kv_cache_dtype) == ("float32", plain.kv_cache_dtype)
    assert compressed.kv_bytes_per_token == plain.kv_bytes_per_token


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [("kv_cache_dtype", "u8", "--kv-cache-dtype u8"), ("prefix_slots", 99, "--prefix-slots 99")],
)
def test_settings_of_openvinos_kv_cache_are_refused_where_plain_pytorch_serves(zoo, setting, value, flag):
    with pytest.raises(ModelError, match=f"^{flag} .* is served by plain PyTorch; leave it out"):
        serve(zoo.folder("gemma2"), **{setting: value})


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draft_tokens_are_verified_as_in_single_steps_beside_other_rows(even, dtype, quantize):
    """Also at the edges of the KV cache's blocks, and whatever wrong draft tokens a slot has seen before."""
    model = serve(even, 128, dtype=dtype, quantize=quantize, threads=2)
    chance = random.Random(0)
    for length in (1, 2, 30, 31, 32, 33, 62):
        prompt, tokens, wrong = ([chance.randrange(1, VOCABULARY) for _ in range(n)] for n in (length, 9, 9))
        model.forward([Chunk(0, prompt, 0)])
        steps = np.concatenate([model.forward([Chunk(0, [token], length + n)]) for n, token in enumerate(tokens)])
        others = [(slot, 40 + slot) for slot in (1, 3)]
        for slot, end in others:
            model.forward([Chunk(slot, prompt[:1] * end, 0)])
        for company in ([], others):
            model.forward([Chunk(0, [*tokens[:1], *wrong], length, verify=True)])
            rows = [Chunk(slot, [7], end) for slot, end in company]
            found = model.forward([Chunk(0, tokens, length, verify=True), *rows])
            if quantize:  # seen to the bit with AVX512; other CPUs have other kernels for eight bits
                assert np.abs(found[: len(tokens)] - steps).max() < 0.05 * np.ptp(steps)
            else:
                assert np.array_equal(found[: len(tokens)], steps)


def test_steps_are_filled_up_where_more_rows_are_quicker_and_give_the_same_bits(even, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 40).tolist()

    def logits(seconds_of):
        monkeypatch.setattr(openvino_model.OpenVinoModel, "_time_call", lambda self, rows: seconds_of(rows))
        model = serve(even, 300, dtype="bfloat16", threads=2)
        chunks = [Chunk(3, prompt, 0)], [Chunk(3, [5], 40)], [Chunk(3, [6], 41), Chunk(4, [7, 8], 0)]
        found = [model.forward(each) for each in chunks]
        is_filled = "are padded" in caplog.text
        caplog.clear()
        assert is_filled == (model.computed_in == "bfloat16" and seconds_of(4) < seconds_of(2))
        return np.concatenate(found)

    assert np.array_equal(logits(lambda rows: 1 / rows), logits(lambda rows: rows))


def test_bfloat16_on_one_thread_is_computed_in_float32(even):
    """OpenVINO divides by zero there on a CPU with AMX."""
    model = serve(even, dtype="bfloat16", threads=1)
    assert (model.engine, model.dtype, model.computed_in, model.threads) == ("openvino", "bfloat16", "float32", 1)


def test_prompt_logits_are_those_of_transformers_and_of_a_prompt_without_them(zoo, converter):
    model, reference = serve(zoo.folder("llama")), zoo.references("llama")[-1]
    (scored,) = run(model, [reference.prompt], all_logits=True)
    loaded = converter.load_pretrained(Config(max_total_tokens=POSITIONS), zoo.folder("llama"), "cpu")
    expected = converter.reference_logits(loaded, reference.prompt)
    assert np.abs(np.array(scored.logits) - expected).max() < 1e-3
    assert scored.tokens == run(model, [reference.prompt])[0].tokens


def test_a_loaded_model_holds_no_pages_of_the_file_that_its_weights_were_packed_from(even):
    def resident_kb():
        mapping = re.compile(r"^.*/model\.bin\n(?:.*\n)*?Rss: +(\d+) kB", re.MULTILINE)
        return sum(map(int, mapping.findall(Path("/proc/self/smaps").read_text())))

    before = resident_kb()  # of other tests' models, which may go
    served = serve(even)
    assert resident_kb() <= before
    run(served, [[7]], 1)
    assert resident_kb() > 0  # its embedding


def test_logits_stay_as_they_are_when_the_model_runs_again(zoo):
    model = serve(zoo.folder("llama"))
    logits = model.forward([Chunk(0, [1, 2], 0)])
    kept = logits.copy()
    model.forward([Chunk(0, [3], 2)])
    assert (logits.dtype, logits.shape) == (np.float32, (1, VOCABULARY)) and np.array_equal(logits, kept)


@pytest.mark.parametrize(("slots", "window", "longest"), [(1, 2, 1), (3, 2, 1), (1, POSITIONS, 2), (3, 6, 5)])
def test_limits_may_be_as_small_as_they_get(zoo, slots, window, longest):
    model = serve(zoo.folder("llama"), window, max_batch_size=slots, max_input_tokens=longest)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (slots, window, longest)
    assert model.forward([Chunk(slots - 1, [1] * window, 0)]).shape == (1, VOCABULARY)


def test_a_sliding_window_longer_than_the_check_is_checked_too(tmp_path, converter, monkeypatch):
    """A layer that does not slide, where transformers' slides, shows in the check with a shortened window."""
    from models.openvino import trace  # imports torch

    folder = save_checkpoint(tmp_path / "mistral", tiny_models.mistral(sliding_window=400, max_position_embeddings=500))
    config = Config(model_id=str(folder), device="cpu").with_manifest(Manifest.read(folder))
    models.convert.convert(config, folder, tmp_path)
    refused = [read_entry(tmp_path)["refused"]]
    attend = trace.PlaceholderFunctions._attend
    never_slides = lambda *args, sliding_window=None, **kwargs: attend(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(trace.PlaceholderFunctions, "_attend", never_slides)
    models.convert.convert(config, folder, tmp_path)
    refused.append(read_entry(tmp_path)["refused"])
    assert refused[0] is None and refused[1].startswith("its logits differ from those of transformers by")


def test_a_window_of_all_positions_does_not_slide_in_the_check(tmp_path, converter):
    folder = save_checkpoint(tmp_path / "phimoe", tiny_models.phimoe(2 * converter.CHECK_WINDOW))
    models.convert.convert(settings(folder), folder, tmp_path)
    assert read_entry(tmp_path)["refused"] is None


WIDE = tiny_models.GROUPED | {"hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 300}
MIXTURES = {
    "mixtral": lambda: transformers.MixtralConfig(**WIDE, num_local_experts=8, num_experts_per_tok=2),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **WIDE, head_dim=32, moe_intermediate_size=64, num_experts=32, num_experts_per_tok=4
    ),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_whose_experts_swap_with_a_rounding_is_served_in_bfloat16(conversions, caplog, family):
    """No experts that all tokens share: OpenVINO's kernel for AMX crashes where those are as narrow as tests' models."""
    folder = made_checkpoint(MIXTURES[family](), spread=0.15)
    assert_starts_in_bfloat16(folder, conversions, max_total_tokens=300, max_batch_size=4, dtype="bfloat16")
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("last_right", [4095, 8191], ids=["wrong", "right"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_rope_that_is_wrong_from_a_position_on_is_found(tmp_path, converter, monkeypatch, family, last_right):
    folder = save_checkpoint(tmp_path / family, tiny_models.ALL[family]())
    config = settings(edit_config(folder, max_position_embeddings=8192))
    trace = converter.trace

    def trace_wrong(model, **options):
        rope = model.model.rotary_emb
        rotate = rope.forward
        rope.forward = lambda states, position_ids: rotate(states, position_ids.clamp(max=last_right))
        return trace(model, **options)

    monkeypatch.setattr(converter, "trace", trace_wrong)
    models.convert.convert(config, folder, tmp_path)
    refused = read_entry(tmp_path)["refused"]
    assert refused is None if last_right == 8191 else refused.startswith("its logits differ from those of transformers by")


@pytest.mark.parametrize("way", ["decode steps", "prompt"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_start_finds_a_fault_of_decode_steps_alone_and_of_prompts_alone(zoo, tmp_path, converter, monkeypatch, family, way):
    folder = zoo.folder(family)
    config = settings(folder, max_batch_size=4)
    models.convert.convert(config, folder, tmp_path)
    forward = openvino_model.OpenVinoModel.forward

    def wrong(model, chunks):
        logits = forward(model, chunks)
        return logits[:, ::-1] if chunks[0].verify == (way == "decode steps") else logits

    monkeypatch.setattr(openvino_model.OpenVinoModel, "forward", wrong)
    with pytest.raises(ValueError, match="its logits differ from those of transformers by"):
        openvino_model.load_entry(config, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_no_numbers_are_refused_in_one_line_that_names_them(tmp_path, dtype):
    folder = save_checkpoint(tmp_path / "llama", tiny_models.llama(), dtype=getattr(torch, dtype))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        serve(folder, dtype="auto")
    assert str(refused.value).startswith(f"{folder} produced NaN or infinite logits in float32: its weights are damaged")


def test_positions_that_stretch_with_the_text_are_served_up_to_the_trained_length_only(zoo):
    folder = zoo.folder("llama-dynamic")
    assert serve(folder).engine == "openvino"
    cache = str(folder.parent / "cache")
    longer = Config(str(folder), model_cache=cache, max_total_tokens=25, max_input_tokens=24, max_batch_size=1)
    with pytest.raises(ModelError, match=f"beyond {POSITIONS} tokens; give --max-total-tokens {POSITIONS} or less"):
        load(longer, folder)


def test_float16_runs_in_plain_pytorch_and_the_log_says_why(zoo, caplog):
    model = serve(zoo.folder("llama"), dtype="float16", max_batch_size=2)
    assert (model.engine, model.dtype) == ("torch", "float16")
    assert "OpenVINO computes in float32 or bfloat16 on a CPU, not in float16" in caplog.text


def test_what_no_engine_can_serve_is_refused_with_its_reason(tmp_path):
    folder = edit_config(save_checkpoint(tmp_path / "llama", tiny_models.llama()), model_type="bloom")
    with pytest.raises(ModelError, match="bloom models with ALiBi"):
        serve(folder)


@pytest.mark.parametrize("family", ["phi3-longrope", "phimoe", "gpt-oss", "llama-4", *tiny_models.WITH_VISION])
def test_a_family_is_served_in_the_type_of_its_checkpoint(conversions, family):
    folder = made_checkpoint(tiny_models.ALL[family](), dtype=torch.bfloat16, spread=0.15)
    assert_starts_in_bfloat16(folder, conversions, dtype="auto")


def assert_starts_in_bfloat16(folder, conversions, **settings):
    """Also from the entry that the first start has left."""
    for _start in range(2):
        model = serve(folder, threads=2, **settings)
        assert (model.engine, model.dtype) == ("openvino", "bfloat16")
    assert len(conversions) <= 1  # none where an earlier run has left it


@pytest.mark.parametrize("family", tiny_models.WITH_VISION)
def test_a_vision_tower_is_not_in_the_graph(zoo, tmp_path, converter, family):
    folder = zoo.folder(family)
    models.convert.convert(settings(folder), folder, tmp_path)
    weights = load_file(folder / "model.safetensors")
    text = [tensor.nbytes for name, tensor in weights.items() if "vis" not in name and "projector" not in name]
    assert abs((tmp_path / "model.bin").stat().st_size - sum(text)) < 2000  # norms of ones are left out


def test_a_model_that_was_converted_for_one_chunk_of_attention_is_not_served_beyond_it(zoo):
    folder = zoo.folder("llama-4")
    assert serve(folder).engine == "openvino"
    cache = str(folder.parent / "cache")
    longer = Config(str(folder), model_cache=cache, max_total_tokens=25, max_input_tokens=24, max_batch_size=1)
    with pytest.raises(ModelError, match=f"beyond {POSITIONS} tokens; give --max-total-tokens {POSITIONS} or less"):
        load(longer, folder)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_compressed_weights_are_smaller_and_close_to_the_model(wide, tmp_path, kind):
    pytest.importorskip("nncf", reason='pip install "nncf==3.4.0"')
    model = serve(wide, quantize=kind)
    assert (model.engine, model.quantize) == ("openvino", kind)
    (weights,) = tmp_path.glob("cache/model-*/*.bin")
    whole = tmp_path / "llama" / "model.safetensors"
    assert weights.stat().st_size < whole.stat().st_size / (3.5 if kind == "int8" else 5)


@pytest.fixture
def wide(tmp_path):
    """A Llama whose layers can be compressed in groups."""
    config = tiny_models.llama(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    return save_checkpoint(tmp_path / "llama", config, spread=0.1)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "groups", "activations"),
    [
        (256, 320, {256: 128, 320: 64}, 64),  # 320 is divided by 64 alone, as 10,944 and 8,640 are
        (608, 256, {608: 32, 256: 128}, 32),
        (96, 152, {96: 32, 152: None}, 32),  # None: int8
    ],
)
def test_int4_has_the_largest_group_that_divides_the_width_of_each_layer(tmp_path, hidden, intermediate, groups, activations):
    pytest.importorskip("nncf", reason='pip install "nncf==3.4.0"')
    heads = hidden // 32
    config = tiny_models.llama(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=heads
    )
    folder = save_checkpoint(tmp_path / "llama", config, spread=0.05)
    model = serve(folder, dtype="bfloat16", quantize="int4", threads=1)
    assert (model.engine, model.quantize) == ("openvino", "int4")
    (entry,) = tmp_path.glob("cache/model-*")
    nodes = openvino_model.read_graph(entry / "model.xml", {}).get_ops()
    compressed = [node.output(0) for node in nodes if node.get_type_name() == "Constant"]
    shapes = [list(each.get_shape()) for each in compressed if each.get_element_type().get_type_name() == "u4"]
    found = {width * group: group for _outputs, width, group in shapes if group > 1}  # 1: of zero points
    assert found == {width: group for width, group in groups.items() if group}
    # With more activations than weights to a scale, OpenVINO leaves its kernels for them.
    assert read_entry(entry)["activation_group"] == activations
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 20).tolist()
    logits = model.forward([Chunk(0, ids, 0, all_logits=True)])
    expected = serve(folder, dtype="float32").forward([Chunk(0, ids, 0, all_logits=True)])
    assert kl_divergence(logits, expected).mean() < 0.3
    parts = [model.forward([Chunk(1, ids[begin : begin + 2], begin, all_logits=True)]) for begin in range(0, 20, 2)]
    assert np.array_equal(np.concatenate(parts), logits)


def test_compressed_linear_layers_of_one_input_are_merged_up_to_a_size_and_compute_the_same(
    wide, converter, tmp_path, monkeypatch
):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 20).tolist()
    found = {}
    for most in (0, 768, 4096):  # query, key and value have 768 outputs together or fewer, gate and up 1,024
        monkeypatch.setattr(converter, "MERGED_OUTPUTS", most)
        cache = tmp_path / str(most)
        model = serve(wide, quantize="int8", model_cache=str(cache))
        (graph,) = cache.glob("model-*/model.xml")
        products = sum(node.get_type_name() == "MatMul" for node in openvino_model.read_graph(graph, {}).get_ops())
        found[most] = products, model.forward([Chunk(0, ids, 0, all_logits=True)])
    assert found[0][0] - found[768][0] == 2 and found[768][0] - found[4096][0] == 1
    for _products, logits in found.values():
        assert np.allclose(logits, found[0][1], atol=0.01 * np.ptp(logits))


def faults(converter, monkeypatch, *found):
    """What the check of each attempt finds, in the place of its own."""
    left = list(found)
    for check in ("fault_on_text", "choose_activation_group"):
        monkeypatch.setattr(converter.Check, check, lambda *_: left.pop(0))


def test_int4_goes_into_fewer_layers_where_the_model_does_not_tolerate_it_in_all(wide, converter, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    faults(converter, monkeypatch, *["too much"] * 4, None)  # groups of 128, 64 and 32; 80 % and 50 % of the layers
    assert serve(wide, quantize="int4").quantize == "int4"
    assert "int4 in 50 % of the layers, int8 in the others" in caplog.text


@pytest.mark.parametrize(
    ("kind", "divergences", "group"),
    [
        ("int8", [0.01], 128),  # from transformers
        ("int8", [0.1, 0.01], 128),  # from transformers, and from the same weights with exact activations
        ("int8", [0.1, 0.1, 0.1, 0.01], 64),
        ("int8", [0.1] * 4, 32),
        ("int4", [0.01], 128),
    ],
)
def test_as_many_activations_share_a_scale_as_the_model_tolerates(
    wide, converter, tmp_path, monkeypatch, kind, divergences, group
):
    left = list(divergences)
    monkeypatch.setattr(converter, "kl_divergence", lambda *_: np.array([left.pop(0)]))
    serve(wide, quantize=kind)
    (entry,) = tmp_path.glob("cache/model-*")
    assert read_entry(entry)["activation_group"] == group
    assert not left


def test_a_model_that_compression_changes_too_much_is_refused_with_the_figures_in_one_line(wide, converter, monkeypatch):
    faults(converter, monkeypatch, *["2 nats"] * 4, "its KL divergence is 1.1 nats")
    with pytest.raises(ModelError) as refused:
        serve(wide, quantize="int4")
    rule = f"{wide} loses too much accuracy: its KL divergence is 1.1 nats"
    assert str(refused.value) == f"--quantize int4 (QUANTIZE): {rule}; leave it out, or use int8"


def test_weights_that_are_broken_by_compression_are_found_by_the_loss(wide, converter, monkeypatch):
    import nncf
    import openvino

    def shuffled(graph, **_):
        for node in graph.get_ordered_ops():
            if node.get_type_name() == "Constant" and node.get_output_partial_shape(0).rank.get_length() == 2:
                value = np.ascontiguousarray(node.get_data()[::-1])
                node.output(0).replace(openvino.opset13.constant(value).output(0))
        return graph

    monkeypatch.setattr(nncf, "compress_weights", shuffled)
    with pytest.raises(ModelError, match=r"--quantize int8 .* loses too much accuracy"):
        serve(wide, quantize="int8")


def test_a_model_that_does_not_tolerate_bfloat16_is_computed_in_float32(even, converter, tmp_path, monkeypatch, caplog):
    faults(converter, monkeypatch, "its KL divergence is 0.2 nats")
    model = serve(even, dtype="bfloat16", threads=2, model_cache=str(tmp_path / "cache"))
    assert (model.engine, model.dtype, model.computed_in) == ("openvino", "bfloat16", "float32")
    assert "does not tolerate arithmetic in bfloat16, and is computed in float32: its KL divergence is 0.2" in caplog.text


def test_the_loss_is_that_of_a_text_where_the_folder_has_a_tokenizer(tmp_path):
    folder = save_checkpoint(tmp_path / "llama", tiny_models.llama(vocab_size=300))
    assert ids_of_text(folder, 300) == []
    tokenizer = byte_tokenizer(folder)
    ids = ids_of_text(folder, 300)
    assert tokenizer.decode(ids).startswith("When in the Course of human events")
    assert ids_of_text(folder, 100) == []  # it is not the tokenizer of this model


def test_without_nncf_one_line_says_what_to_install(zoo, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'--quantize int8 \(QUANTIZE\) needs .*python\S* -m pip install "nncf==3.4.0"'):
        serve(zoo.folder("opt"), quantize="int8")


def test_compressed_weights_are_refused_where_only_pytorch_serves(zoo):
    with pytest.raises(ModelError, match="--quantize int8"):
        serve(zoo.folder("falcon"), quantize="int8")


keeping = st.tuples(st.integers(1, 200), st.booleans())


@given(lengths=st.lists(keeping, min_size=1, max_size=12), most=st.sampled_from([4, 5, 64, inf]))
def test_a_long_call_is_split_into_shorter_ones_that_leave_no_token_of_a_chunk_alone(lengths, most):
    chunks = [Chunk(slot, list(range(n)), 7, all_logits) for slot, (n, all_logits) in enumerate(lengths)]
    found = {chunk.slot: [] for chunk in chunks}
    for call in openvino_model.split(chunks, most, 1, whole_images=False):
        assert 0 < sum(len(piece[1]) for piece in call) <= most
        for piece in call:
            found[piece[0]].append(piece)
    for slot, tokens, begin, all_logits, *_ in chunks:
        assert [token for piece in found[slot] for token in piece[1]] == tokens
        assert [piece[2] for piece in found[slot]] == [begin + piece[1][0] for piece in found[slot]]
        assert min(len(piece[1]) for piece in found[slot]) >= min(2, len(tokens))
        assert sum(piece[3] for piece in found[slot]) == (len(tokens) if all_logits else 1)
        assert found[slot][-1][3] >= 1


def test_a_model_is_converted_ahead_of_its_start(tmp_path, monkeypatch, converter, caplog):
    folder = save_checkpoint(tmp_path / "model", tiny_models.llama())
    monkeypatch.setenv("MODEL_ID", str(folder))
    monkeypatch.setenv("MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DEVICE", "cpu")
    assert models.convert.main(["--ahead"]) == 0
    caplog.clear()
    config = Config(model_id=str(folder), model_cache=str(tmp_path / "cache"), device="cpu", max_total_tokens=POSITIONS)
    assert models.load(models.prepare(config), lambda phase: None).engine == "openvino"
    assert "Converting" not in caplog.text
