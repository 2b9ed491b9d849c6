"""How models with recurrent states are converted for OpenVINO: what is float32 in any dtype, the long text of their check,
tiles where these are faster, and int4 that leaves out what states do not tolerate."""

from itertools import chain, repeat

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from templates import FOLDER
from tiny_models import made_checkpoint, settings
from tokenizers import Tokenizer

from manifest import Manifest
from models.base import Chunk
from models.cache import NotConverted, read_entry
from models.checkpoint.pretrained import load_pretrained
from models.openvino import OpenVino
from models.openvino.check_text import CHECK_TEXT
from models.openvino.delta_tiles import TILE

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("conversions"), pytest.mark.filterwarnings("ignore")]

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
MLP = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}


def qwen(**changes):
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
    return transformers.Qwen3_5TextConfig(**SIZES | MLP | heads | layers | changes)


CONFIGS = {
    "delta rule": qwen(),
    "Mamba 2": transformers.BambaConfig(
        **SIZES | MLP, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=2
    ),
    "Mamba 1": transformers.MambaConfig(**SIZES, state_size=16, time_step_rank=8),
}
IN_FLOAT32 = ("A_log", "dt_bias", ".D", "linear_attn.norm.weight", "mamba.norm.weight")


def serve(folder, tmp_path, max_total_tokens=256, **changes):
    config = settings(folder, max_total_tokens, model_cache=str(tmp_path / "cache"), **changes)
    return OpenVino(config, folder, Manifest.read(folder)).load(lambda phase: None)


def with_parameters_in_float32(folder):
    random = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(IN_FLOAT32):
            tensors[name] = tensor.float() + 0.01 * torch.rand(tensor.shape, generator=random)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", CONFIGS)
def test_what_a_checkpoint_has_in_float32_beside_bfloat16_is_not_rounded(tmp_path, family):
    folder = made_checkpoint(CONFIGS[family], with_parameters_in_float32, dtype=torch.bfloat16, spread=0.1)
    stored = load_file(folder / "model.safetensors")
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert kept
    loaded = load_pretrained(settings(folder, 256, dtype="bfloat16"), folder, "cpu").state_dict()
    assert {name for name, tensor in loaded.items() if tensor.dtype == torch.float32} == kept
    assert all(torch.equal(loaded[name], stored[name]) for name in kept)
    ids = list(range(VOCABULARY)) * 2
    found, expected = (
        serve(folder, tmp_path, dtype=dtype).forward([Chunk(0, ids, 0, all_logits=True)]) for dtype in ("bfloat16", "float32")
    )
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


class Ran(list):
    """The chunks that a conversion runs; the logits of `broken` positions are wrong."""

    def __init__(self, converter, monkeypatch, broken=()):
        forward = converter.OpenVinoModel.forward

        def run(model, chunks, *arguments):
            self.extend(chunks)
            logits = forward(model, chunks, *arguments)
            is_broken = len(chunks[0].tokens) == 1 and chunks[0].begin in broken
            return logits[:, ::-1] if is_broken else logits

        monkeypatch.setattr(converter.OpenVinoModel, "forward", run)


@pytest.mark.parametrize(("positions", "steps"), [(4096, range(2000, 2064)), (100, range(36, 100))])
def test_a_model_with_states_is_checked_on_a_long_text_and_decode_steps_behind_it(
    tmp_path, converter, monkeypatch, positions, steps
):
    ran = Ran(converter, monkeypatch)
    folder = made_checkpoint(qwen(max_position_embeddings=positions))
    serve(folder, tmp_path, 64)
    assert set(steps) <= {chunk.begin for chunk in ran if len(chunk.tokens) == 1}
    assert max(chunk.begin + len(chunk.tokens) for chunk in ran) == steps.stop


def test_a_state_that_is_wrong_after_a_long_text_is_found(tmp_path, converter, monkeypatch):
    Ran(converter, monkeypatch, broken=[2063])
    folder = made_checkpoint(qwen())
    with pytest.raises(NotConverted, match="its logits differ from those of transformers"):
        serve(folder, tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "mistral_nemo"])
def test_the_text_is_long_enough(converter, name):
    tokenizer = Tokenizer.from_file(str(FOLDER / f"tokenizer-{name}" / "models" / "tokenizer.json"))
    assert len(tokenizer.encode(CHECK_TEXT.read_text()).ids) >= converter.LONG_TEXT_TOKENS


@pytest.mark.parametrize(
    ("seconds", "in_rows", "tiles"), [(0.95, 1.0, False), (0.85, 1.0, True), (0.0011, 0.003, False), (0.0009, 0.003, True)]
)
def test_prompts_run_in_tiles_where_these_take_a_tenth_and_two_milliseconds_less(
    tmp_path, converter, monkeypatch, seconds, in_rows, tiles
):
    times = iter([[in_rows, 9.0], [9.0, seconds]])
    monkeypatch.setattr(converter.timeit, "repeat", lambda *_, **__: next(times))
    model = serve(made_checkpoint(qwen()), tmp_path)
    assert model.chunk_granularity == model.prefix_granularity == (TILE if tiles else 1)
    (entry,) = tmp_path.glob("cache/model-*")
    assert read_entry(entry)["tiles"] == tiles
    assert next(times, None) is None


def types_of_layers(graph):
    """The types of the weights of a layer's linear layers, by name; merged ones have the first name of them."""
    types = {}
    for node in graph.get_ordered_ops():
        name = node.get_friendly_name().removeprefix("__module.model.model.layers.0.").split("/")[0]
        if node.get_type_name() == "MatMul" and name.startswith(("linear_attn", "mlp")):
            weights = node.input_value(1).get_node()
            while weights.get_input_size():
                weights = weights.input_value(0).get_node()
            types[name] = weights.get_output_element_type(0).get_type_name()
    return types


WIDE = {"linear_num_key_heads": 32, "linear_num_value_heads": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 32}
GATES_AND_OUTPUT = {"linear_attn.in_proj_a": "u8", "linear_attn.out_proj": "u8"}


@pytest.mark.parametrize(
    ("changes", "attempts", "expected"),
    [
        ({}, 1, {"linear_attn.in_proj_qkv": "u4"}),
        (WIDE, 1, {"linear_attn.in_proj_qkv": "u4", "linear_attn.in_proj_z": "u4"}),
        ({}, 4, {"linear_attn.in_proj_qkv": "u8"}),
        (WIDE, 4, {"linear_attn.in_proj_qkv": "u8", "linear_attn.in_proj_z": "u8"}),
    ],
)
def test_int4_leaves_gates_and_output_of_a_delta_rule_and_then_all_its_layers_in_int8(
    tmp_path, converter, monkeypatch, changes, attempts, expected
):
    pytest.importorskip("nncf", reason='pip install "nncf==3.4.0"')
    import openvino

    faults = chain(repeat("too much", attempts - 1), [None])
    monkeypatch.setattr(converter.Check, "choose_activation_group", lambda *_: next(faults))
    model = serve(made_checkpoint(qwen(**changes), spread=0.05), tmp_path, quantize="int4")
    assert model.quantize == "int4"
    (path,) = tmp_path.glob("cache/model-*/model.xml")
    mlp = {"mlp.down_proj": "u4", "mlp.gate_proj": "u4"}
    assert types_of_layers(openvino.Core().read_model(path)) == GATES_AND_OUTPUT | mlp | expected
