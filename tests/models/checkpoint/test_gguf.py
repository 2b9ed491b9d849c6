"""A GGUF file gives the logits and the ids of the checkpoint that it was made of, or one line that says why not."""

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from ggufs import write_gguf
from safetensors.torch import load_file
from tiny_models import save_checkpoint

from engine.defaults import sampling_defaults
from manifest import Manifest, read_json
from models.checkpoint.gguf import convert_gguf
from models.errors import ModelError
from models.gguf.keys import LAYERS_OF_27B

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

POSITIONS = 2048
LENGTHS = (40, 150, 1000)
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SHORT, LONG = [1.0, 1.03, 1.06, 1.09, 1.12, 1.15], [1.0, 1.7, 2.4, 3.1, 3.8, 4.5]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 512}
NEAR = {"rope_type": "default", "rope_theta": 10000.0}
FAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}


def rope(theta=10000.0, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def llama(**changes):
    return transformers.LlamaConfig(**SMALL | rope() | changes)


def qwen35(architecture, **keys):
    """The keys of its layers, and others."""
    keys |= {"full_attention_interval": 2, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]}
    keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32}
    return {f"{architecture}.{name}": value for name, value in keys.items()}


# What is proved: the configuration, the architecture, the keys beside the usual ones.
FAMILIES = {
    "llama": (llama(head_dim=24, attention_bias=True), "llama", {"llama.rope.dimension_count": 24}),
    "linear rope": (
        llama(**rope(rope_type="linear", factor=4.0)),
        "llama",
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "yarn": (
        transformers.Qwen2Config(**SMALL | rope(1e6, **YARN)),
        "qwen2",
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 512,
            "qwen2.rope.scaling.attn_factor": 1.0,  # yarn's own factor is multiplied by it
        },
    ),
    "longrope and a part of each head": (
        transformers.Phi3Config(**SMALL | rope(**LONGROPE, partial_rotary_factor=0.75), original_max_position_embeddings=512),
        "phi3",
        {
            "phi3.attention.sliding_window": 0,
            "phi3.rope.dimension_count": 12,
            "phi3.rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(512))),
            "phi3.rope.scaling.original_context_length": 512,
        },
    ),
    "a window": (
        transformers.Phi3Config(**SMALL | rope(), sliding_window=64),
        "phi3",
        {"phi3.attention.sliding_window": 64, "phi3.rope.dimension_count": 16},
    ),
    "a window in some layers": (
        transformers.Gemma3TextConfig(
            **SMALL | {"num_hidden_layers": 6, "tie_word_embeddings": True},
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=64,
            rope_parameters={"full_attention": FAR, "sliding_attention": NEAR},
        ),
        "gemma3",
        {
            "gemma3.attention.sliding_window": 64,
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    ),
    "experts": (
        transformers.Qwen3MoeConfig(**SMALL | rope(1e6) | EXPERTS, head_dim=32, norm_topk_prob=True),
        "qwen3moe",
        {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 32},
    ),
    "a shared expert": (
        transformers.Qwen2MoeConfig(**SMALL | rope(1e6) | EXPERTS, shared_expert_intermediate_size=48),
        "qwen2moe",
        {
            "qwen2moe.expert_count": 4,
            "qwen2moe.expert_used_count": 2,
            "qwen2moe.expert_feed_forward_length": 32,
            "qwen2moe.expert_shared_feed_forward_length": 48,
        },
    ),
    "theta": (transformers.Starcoder2Config(**SMALL | rope(1e6), sliding_window=4096), "starcoder2", {}),
    "linear attention": (
        transformers.Qwen3_5TextConfig(**SMALL | LINEAR | rope(1e7, **SECTIONS), head_dim=32, full_attention_interval=2),
        "qwen35",
        qwen35("qwen35"),
    ),
    "linear attention and experts": (
        transformers.Qwen3_5MoeTextConfig(
            **SMALL | LINEAR | EXPERTS | rope(1e7, **SECTIONS),
            head_dim=32,
            full_attention_interval=2,
            shared_expert_intermediate_size=48,
        ),
        "qwen35moe",
        qwen35(
            "qwen35moe",
            expert_count=4,
            expert_used_count=2,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=48,
        ),
    ),
    "short convolutions": (
        transformers.Lfm2Config(
            **SMALL | {"tie_word_embeddings": True} | rope(1e6), full_attn_idxs=[1], block_auto_adjust_ff_dim=False
        ),
        "lfm2",
        {"lfm2.attention.head_count_kv": [0, 2], "lfm2.shortconv.l_cache": 3, "lfm2.attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "state spaces": (
        transformers.MambaConfig(
            vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=16, expand=2, tie_word_embeddings=False
        ),
        "mamba",
        {
            "mamba.context_length": POSITIONS,
            "mamba.attention.layer_norm_rms_epsilon": 1e-5,
            "mamba.feed_forward_length": 0,
            "mamba.ssm.conv_kernel": 4,
            "mamba.ssm.inner_size": 128,
            "mamba.ssm.state_size": 16,
            "mamba.ssm.time_step_rank": 4,
        },
    ),
    "a part of each head": (
        transformers.NemotronConfig(**SMALL | rope(partial_rotary_factor=0.5), head_dim=32, norm_eps=1e-3),
        "nemotron",
        {"nemotron.rope.dimension_count": 8},
    ),
}


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return [model(torch.randint(0, 97, (1, length), generator=generator)).logits[0] for length in LENGTHS]


def read(file, target, dtype="float32"):
    target.mkdir()
    convert_gguf(file, dtype, target)
    return target


def assert_equal(checkpoint, file, tmp_path):
    folder = read(file, tmp_path / "read")
    for ours, original in zip(logits(folder), logits(checkpoint)):
        assert (ours - original).abs().max() < 1e-4
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_original_checkpoint(name, tmp_path):
    config, architecture, keys = FAMILIES[name]
    checkpoint = save_checkpoint(tmp_path / "original", config)
    factors = {}
    if name.startswith("longrope"):
        factors = {"rope_factors_short.weight": np.array(SHORT), "rope_factors_long.weight": np.array(LONG)}
    assert_equal(checkpoint, write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture, keys, factors), tmp_path)


def test_quantized_matrices_of_linear_attention_are_dequantized_in_the_order_of_their_heads(tmp_path):
    config, architecture, keys = FAMILIES["linear attention"]
    checkpoint = save_checkpoint(tmp_path / "original", config)
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture, keys, kinds={2: "Q8_0"})
    found, expected = (load_file(folder / "model.safetensors") for folder in (read(file, tmp_path / "read"), checkpoint))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 0.01, name


def test_the_block_that_predicts_further_tokens_is_left_out(tmp_path):
    config, architecture, keys = FAMILIES["linear attention"]
    checkpoint = save_checkpoint(tmp_path / "original", config)
    more = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    extra = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128)), "blk.2.ffn_up.weight": np.ones((96, 64))}
    assert_equal(checkpoint, write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture, keys | more, extra), tmp_path)


def test_attention_of_gemma_2_27b_is_scaled_by_the_size_of_the_model(tmp_path, monkeypatch):
    """llama.cpp knows it by its 46 layers, with which this test would take a minute."""
    monkeypatch.setitem(LAYERS_OF_27B, "gemma2", 2)
    config = transformers.Gemma2Config(
        **SMALL | {"tie_word_embeddings": True} | rope(),
        head_dim=32,
        query_pre_attn_scalar=16,
        sliding_window=64,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    )
    checkpoint = save_checkpoint(tmp_path / "original", config)
    keys = {
        "gemma2.attention.sliding_window": 64,
        "gemma2.attn_logit_softcapping": 5.0,
        "gemma2.final_logit_softcapping": 3.0,
    }
    assert_equal(checkpoint, write_gguf(tmp_path / "tiny.gguf", checkpoint, "gemma2", keys), tmp_path)


def rope_freqs(**changes):
    """The tensor that says how Llama 3.1 and later scale their rope."""
    plain, scaled = (
        transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(llama(**rope(500000.0, **kind))).inv_freq
        for kind in ({}, LLAMA3 | changes)
    )
    return {"rope_freqs.weight": (plain / scaled).numpy()}


def test_the_rope_of_llama_3_1_and_later_is_read_from_its_tensor(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "original", llama(**rope(500000.0, **LLAMA3)))
    folder = assert_equal(checkpoint, write_gguf(tmp_path / "tiny.gguf", checkpoint, extra=rope_freqs()), tmp_path)
    assert read_json(folder / "config.json")["rope_parameters"] == {"rope_theta": 500000.0} | LLAMA3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", llama())


REFUSED = {
    "`llama.expert_count` 8, which cannot be read": {"keys": {"llama.expert_count": 8}},
    "`llama.attention.scale` 0.5, which cannot be read": {"keys": {"llama.attention.scale": 0.5}},
    "rope scaling of the type longrope": {"keys": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}},
    "a rope_freqs.weight that is not Llama 3.1's": {"extra": {"rope_freqs.weight": np.linspace(1, 8, 8)}},
    r"lacks 2 of the model's weights, such as model.layers.0.mlp.up_proj": {"left_out": "ffn_up.weight"},
    r"holds model.layers.1.mlp.up_proj.weight in the shape \[95, 64\], not \[96, 64\]": {
        "extra": {"blk.1.ffn_up.weight": np.zeros((95, 64))}
    },
    "holds 74,192 parameters, of which 74,176 can be read": {"extra": {"blk.0.attn_q_norm.weight": np.zeros(16)}},
    "the pre-tokenizer viking, which is not known": {"keys": {"tokenizer.ggml.pre": "viking"}},
    "the architecture granite; falcon, gemma2, .* can be read": {"architecture": "granite"},
    "the architecture granitehybrid; falcon, gemma2, .* can be read": {"architecture": "granitehybrid"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_be_read_wrong_is_refused_by_name(checkpoint, tmp_path, reason):
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, **REFUSED[reason])
    with pytest.raises(ModelError, match=rf"^tiny.gguf .*{reason}.*; serve the checkpoint") as refused:
        read(file, tmp_path / "read")
    assert "\n" not in str(refused.value)


def test_a_key_that_says_no_is_no_obstacle(checkpoint, tmp_path):
    assert_equal(checkpoint, write_gguf(tmp_path / "tiny.gguf", checkpoint, keys={"llama.expert_count": 0}), tmp_path)


def test_the_checkpoint_has_the_tokenizer_the_template_and_the_sampling_of_the_file(checkpoint, tmp_path):
    keys = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eot_token_id": 2, "general.sampling.temp": 0.6}
    folder = read(write_gguf(tmp_path / "tiny.gguf", checkpoint, keys=keys), tmp_path / "read")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("AB").ids == [0, 32, 33]
    assert max(tokenizer.encode("<|endoftext|>").ids) < 97
    manifest = Manifest.read(folder)
    assert set(manifest.eos_token_ids) == {1, 2}
    assert sampling_defaults(manifest, "host") == {"temperature": 0.6}
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
