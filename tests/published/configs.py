"""What published models say of themselves: config.json as far as it decides what is computed, generation_config.json.

Facts of the files on the hub, but for the factors of longropes. `CONFIGS` are the models that run on Neuron, with the number
of their parameters as it is counted there, so a wrong size is found; `OTHERS` are other families. `of_hub` gives both files.
"""

import math
from typing import Any


def code(module, prefix, model="ForCausalLM"):
    """The Python code that a repository brings, as its config.json names it."""
    names = {
        "AutoConfig": f"configuration_{module}.{prefix}Config",
        "AutoModelForCausalLM": f"modeling_{module}.{prefix}{model}",
    }
    return {"auto_map": names}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
QWEN = {"vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6, "use_sliding_window": False}
SMALL_QWEN = QWEN | {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001}
QWEN3_MOE = QWEN3 | QWEN_MOE | {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6}
LONGROPE = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "vocab_size": 49159, "tie_word_embeddings": True}
GRANITE |= {"max_position_embeddings": 131072, "rope_theta": 1e7, "rms_norm_eps": 1e-5}
GEMMA = {"vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh"}
GEMMA2 = GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {"vocab_size": 262144, "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512}
GEMMA3 |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000}
GEMMA3 |= {"rope_theta": 1e6, "sliding_window_pattern": 6}
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS = {"vocab_size": 201088, "head_dim": 64, "max_position_embeddings": 131072, "rope_theta": 150000, "rms_norm_eps": 1e-5}
GPT_OSS |= {"rope_scaling": GPT_OSS_YARN | {"original_max_position_embeddings": 4096}, "initial_context_length": 4096}
GPT_OSS |= {"attention_bias": True, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128}
GPT_OSS |= {"swiglu_limit": 7.0, "eos_token_id": 200002, "pad_token_id": 199999}
OLMO2 = {"vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6}
INTERNLM2 = {"vocab_size": 92544, "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "bias": False}
INTERNLM2 |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}, **code("internlm2", "InternLM2")}


def longrope(pairs):
    short, long = ([1.0 + step * n for n in range(pairs)] for step in (0.03, 0.7))
    return LONGROPE | {"rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long}}


def sizes(hidden, intermediate, layers, heads, kv_heads):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def llama(vocabulary, length, theta, **more):
    fields = {"vocab_size": vocabulary, "max_position_embeddings": length, "rope_theta": theta, "rms_norm_eps": 1e-5}
    return {"model_type": "llama", **fields} | more


def mistral(vocabulary, length, theta, **more):
    return llama(vocabulary, length, theta, **more) | {"model_type": "mistral"} | ({"sliding_window": None} | more)


def of(model_type, fields, **more):
    return {"model_type": model_type, **fields} | more


# hub id: (its parameters, its sizes, its other fields)
_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        8_030_261_248,
        sizes(4096, 14336, 32, 32, 8),
        llama(128256, 131072, 5e5, rope_scaling=LLAMA3 | {"factor": 8.0}),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        1_235_814_400,
        sizes(2048, 8192, 16, 32, 8),
        llama(128256, 131072, 5e5, rope_scaling=LLAMA3 | {"factor": 32.0}, tie_word_embeddings=True, head_dim=64),
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        70_553_706_496,
        sizes(8192, 28672, 80, 64, 8),
        llama(128256, 131072, 5e5, rope_scaling=LLAMA3 | {"factor": 8.0}),
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (1_100_048_384, sizes(2048, 5632, 22, 32, 4), llama(32000, 2048, 1e4)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        1_711_376_384,
        sizes(2048, 8192, 24, 32, 32),
        llama(49152, 8192, 130000, tie_word_embeddings=True),
    ),
    "01-ai/Yi-1.5-9B-Chat": (8_829_407_232, sizes(4096, 11008, 48, 32, 4), llama(64000, 4096, 5e6)),
    "tiiuae/Falcon3-7B-Instruct": (7_455_550_464, sizes(3072, 23040, 28, 12, 4), llama(131072, 32768, 1000042, head_dim=256)),
    "deepseek-ai/deepseek-coder-6.7b-instruct": (
        6_740_512_768,
        sizes(4096, 11008, 32, 32, 32),
        llama(32256, 16384, 1e5, rope_scaling={"type": "linear", "factor": 4.0}),
    ),
    "mistralai/Mistral-7B-Instruct-v0.1": (
        7_241_732_096,
        sizes(4096, 14336, 32, 32, 8),
        mistral(32000, 32768, 1e4, sliding_window=4096),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (7_248_023_552, sizes(4096, 14336, 32, 32, 8), mistral(32768, 32768, 1e6)),
    "mistralai/Mistral-Nemo-Instruct-2407": (
        12_247_782_400,
        sizes(5120, 14336, 40, 32, 8),
        mistral(131072, 1024000, 1e6, head_dim=128),
    ),
    "mistralai/Mistral-Small-24B-Instruct-2501": (
        23_572_403_200,
        sizes(5120, 32768, 40, 32, 8),
        mistral(131072, 32768, 1e8, head_dim=128),
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        8_019_808_256,
        sizes(4096, 12288, 36, 32, 8),
        mistral(131072, 32768, 1e8, head_dim=128, sliding_window=32768),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (494_032_768, sizes(896, 4864, 24, 14, 2), of("qwen2", SMALL_QWEN)),
    "Qwen/Qwen2.5-1.5B-Instruct": (1_543_714_304, sizes(1536, 8960, 28, 12, 2), of("qwen2", SMALL_QWEN)),
    "Qwen/Qwen2.5-3B-Instruct": (3_085_938_688, sizes(2048, 11008, 36, 16, 2), of("qwen2", SMALL_QWEN)),
    "Qwen/Qwen2.5-7B-Instruct": (7_615_616_512, sizes(3584, 18944, 28, 28, 4), of("qwen2", QWEN)),
    "Qwen/Qwen2.5-14B-Instruct": (14_770_033_664, sizes(5120, 13824, 48, 40, 8), of("qwen2", QWEN)),
    "Qwen/Qwen2.5-32B-Instruct": (32_763_876_352, sizes(5120, 27648, 64, 40, 8), of("qwen2", QWEN)),
    "Qwen/Qwen2.5-72B-Instruct": (72_706_203_648, sizes(8192, 29568, 80, 64, 8), of("qwen2", QWEN)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        1_777_088_000,
        sizes(1536, 8960, 28, 12, 2),
        of("qwen2", QWEN, vocab_size=151936, max_position_embeddings=131072, rope_theta=1e4),
    ),
    "Qwen/Qwen3-0.6B": (596_049_920, sizes(1024, 3072, 28, 16, 8), of("qwen3", QWEN3, tie_word_embeddings=True)),
    "Qwen/Qwen3-1.7B": (1_720_574_976, sizes(2048, 6144, 28, 16, 8), of("qwen3", QWEN3, tie_word_embeddings=True)),
    "Qwen/Qwen3-4B-Instruct-2507": (
        4_022_468_096,
        sizes(2560, 9728, 36, 32, 8),
        of("qwen3", QWEN3, tie_word_embeddings=True, rope_theta=5e6, max_position_embeddings=262144),
    ),
    "Qwen/Qwen3-8B": (8_190_735_360, sizes(4096, 12288, 36, 32, 8), of("qwen3", QWEN3)),
    "Qwen/Qwen3-14B": (14_768_307_200, sizes(5120, 17408, 40, 40, 8), of("qwen3", QWEN3)),
    "Qwen/Qwen3-32B": (32_762_123_264, sizes(5120, 25600, 64, 64, 8), of("qwen3", QWEN3)),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": (
        8_190_735_360,
        sizes(4096, 12288, 36, 32, 8),
        of(
            "qwen3",
            QWEN3,
            max_position_embeddings=131072,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        3_821_079_552,
        sizes(3072, 8192, 32, 32, 32),
        of("phi3", {"vocab_size": 32064, "max_position_embeddings": 4096, "sliding_window": 2047}),
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        3_821_079_552,
        sizes(3072, 8192, 32, 32, 32),
        of("phi3", longrope(48), vocab_size=32064),
    ),
    "microsoft/phi-4": (
        14_659_507_200,
        sizes(5120, 17920, 40, 40, 10),
        of("phi3", {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None}),
    ),
    "microsoft/Phi-4-mini-instruct": (
        3_836_021_760,
        sizes(3072, 8192, 32, 24, 8),
        of("phi3", longrope(48), vocab_size=200064, partial_rotary_factor=0.75, tie_word_embeddings=True),
    ),
    "ibm-granite/granite-3.3-2b-instruct": (
        2_533_539_840,
        sizes(2048, 8192, 40, 32, 8),
        of("granite", GRANITE, attention_multiplier=0.015625, logits_scaling=8.0),
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        8_170_864_640,
        sizes(4096, 12800, 40, 32, 8),
        of("granite", GRANITE, attention_multiplier=0.0078125, logits_scaling=16.0),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        3_075_098_624,
        sizes(2048, 11008, 36, 16, 4),
        of(
            "smollm3",
            {"vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5e6, "tie_word_embeddings": True},
            no_rope_layers=[1, 1, 1, 0] * 9,
        ),
    ),
    "google/gemma-2b-it": (2_506_172_416, sizes(2048, 16384, 18, 8, 1), of("gemma", GEMMA)),
    "google/gemma-7b-it": (8_537_680_896, sizes(3072, 24576, 28, 16, 16), of("gemma", GEMMA)),
    "google/gemma-2-2b-it": (2_614_341_888, sizes(2304, 9216, 26, 8, 4), of("gemma2", GEMMA2)),
    "google/gemma-2-9b-it": (9_241_705_984, sizes(3584, 14336, 42, 16, 8), of("gemma2", GEMMA2)),
    "google/gemma-2-27b-it": (
        27_227_128_320,
        sizes(4608, 36864, 46, 32, 16),
        of("gemma2", GEMMA2, head_dim=128, query_pre_attn_scalar=144),
    ),
    "google/gemma-3-270m-it": (268_098_176, sizes(640, 2048, 18, 4, 1), of("gemma3_text", GEMMA3)),
    "google/gemma-3-1b-it": (999_885_952, sizes(1152, 6912, 26, 4, 1), of("gemma3_text", GEMMA3)),
    "allenai/OLMo-2-0425-1B-Instruct": (1_484_916_736, sizes(2048, 8192, 16, 16, 16), of("olmo2", OLMO2)),
    "allenai/OLMo-2-1124-7B-Instruct": (7_298_617_344, sizes(4096, 11008, 32, 32, 32), of("olmo2", OLMO2)),
    "allenai/OLMo-2-0325-32B-Instruct": (32_234_279_936, sizes(5120, 27648, 64, 40, 8), of("olmo2", OLMO2)),
    "allenai/Olmo-3-7B-Instruct": (
        7_298_011_136,
        sizes(4096, 11008, 32, 32, 32),
        of(
            "olmo3",
            {"vocab_size": 100278, "max_position_embeddings": 65536, "rope_theta": 500000, "rms_norm_eps": 1e-6},
            sliding_window=4096,
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
            rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
        ),
    ),
    "internlm/internlm2_5-7b-chat": (
        7_737_708_544,
        sizes(4096, 14336, 32, 32, 8),
        of("internlm2", INTERNLM2) | code("internlm2", "InternLM2"),
    ),
    "internlm/internlm2_5-20b-chat": (
        19_861_149_696,
        sizes(6144, 16384, 48, 48, 8),
        of("internlm2", INTERNLM2) | code("internlm2", "InternLM2"),
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        46_702_792_704,
        sizes(4096, 14336, 32, 32, 8),
        mistral(32000, 32768, 1e6) | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Qwen/Qwen3-30B-A3B": (
        30_532_122_624,
        sizes(2048, 6144, 48, 32, 4),
        of("qwen3_moe", QWEN3_MOE, moe_intermediate_size=768),
    ),
    "Qwen/Qwen3-235B-A22B": (
        235_093_634_560,
        sizes(4096, 12288, 94, 64, 4),
        of("qwen3_moe", QWEN3_MOE, moe_intermediate_size=1536),
    ),
    "allenai/OLMoE-1B-7B-0924-Instruct": (
        6_919_161_856,
        sizes(2048, 1024, 16, 16, 16),
        of("olmoe", {"vocab_size": 50304, "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5})
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None},
    ),
    "unsloth/gpt-oss-20b-BF16": (
        20_914_757_184,
        sizes(2880, 2880, 24, 64, 8),
        of("gpt_oss", GPT_OSS, num_local_experts=32, layer_types=["sliding_attention", "full_attention"] * 12),
    ),
    "unsloth/gpt-oss-120b-BF16": (
        116_829_156_672,
        sizes(2880, 2880, 36, 64, 8),
        of("gpt_oss", GPT_OSS, num_local_experts=128, layer_types=["sliding_attention", "full_attention"] * 18),
    ),
}
CONFIGS = {name: {**fields, **numbers, "torch_dtype": "bfloat16"} for name, (_count, numbers, fields) in _MODELS.items()}
PARAMETERS = {name: count for name, (count, _numbers, _fields) in _MODELS.items()}

LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK = MLA | {"vocab_size": 102400, "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6}
DEEPSEEK |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_shared_experts": 2, "num_experts_per_tok": 6}
DEEPSEEK_V3 = DEEPSEEK | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "ep_size": 1}
GLM4 = {"vocab_size": 151552, "head_dim": 128, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072}
COHERE = {"vocab_size": 256000, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "torch_dtype": "float16"}
STABLELM = {"vocab_size": 100352, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5}
EXAONE4 = {"vocab_size": 102400, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3 | {"factor": 16.0}}
OPT = {"activation_function": "relu", "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16"}
OPT |= {"dropout": 0.1, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
FALCON = {"vocab_size": 65024, "bias": False, "layer_norm_epsilon": 1e-5, "bos_token_id": 11, "eos_token_id": 11}
MINISTRAL3_ROPE = {"rope_type": "yarn", "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL3_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MAMBA = {"hidden_act": "silu", "use_bias": False, "use_conv_bias": True, "rms_norm": True, "residual_in_fp32": True}
GRANITE4 = GRANITE | {"vocab_size": 100352, "attention_multiplier": 0.015625, "normalization_function": "rmsnorm"}
GRANITE4 |= {"mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
PIXTRAL = {"model_type": "pixtral", "head_dim": 64, "image_size": 1540, "num_channels": 3, "patch_size": 14}
QWEN_VISION = {"in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
QWEN_IMAGES = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
QWEN_IMAGES |= {"image_token_id": 151655, "video_token_id": 151656}
QWEN35 = {
    **of("qwen3_5_text", sizes(2560, 9216, 32, 16, 4), head_dim=256, vocab_size=248320, max_position_embeddings=262144),
    **{"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "rms_norm_eps": 1e-6},
    **LINEAR,
    **{"linear_num_value_heads": 32, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8},
    **{"dtype": "bfloat16", "eos_token_id": 248044, "tie_word_embeddings": True},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
    },
}
LLAMA4_TEXT = {
    **of("llama4_text", sizes(5120, 8192, 48, 40, 8), head_dim=128, vocab_size=202048, max_position_embeddings=10485760),
    **{"attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192},
    **{"intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "num_local_experts": 16},
    **{"no_rope_layers": [1, 1, 1, 0] * 12, "rms_norm_eps": 1e-5, "use_qk_norm": True, "rope_theta": 500000.0},
    **{"rope_scaling": LLAMA3 | {"factor": 16.0}, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008]},
}

_OTHERS = {
    "meta-llama/Llama-2-7b-chat-hf": sizes(4096, 11008, 32, 32, 32) | llama(32000, 4096, 1e4, torch_dtype="float16"),
    "meta-llama/Meta-Llama-3-8B-Instruct": sizes(4096, 14336, 32, 32, 8) | llama(128256, 8192, 5e5),
    "mistralai/Ministral-3-8B-Instruct-2512": sizes(4096, 14336, 34, 32, 8)
    | of("ministral3", {"vocab_size": 131072, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5})
    | {"sliding_window": None, "rope_parameters": MINISTRAL3_ROPE | {"rope_theta": 1e6}},
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": {
        **{"model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False, "spatial_merge_size": 2},
        **{"projector_hidden_act": "gelu", "vision_feature_layer": -1},
        "text_config": sizes(5120, 32768, 40, 32, 8) | mistral(131072, 131072, 1e9, head_dim=128),
        "vision_config": sizes(1024, 4096, 24, 16, 16) | PIXTRAL | {"hidden_act": "silu", "rope_theta": 1e4},
    },
    "Qwen/Qwen2-7B-Instruct": sizes(3584, 18944, 28, 28, 4) | of("qwen2", QWEN, sliding_window=131072, max_window_layers=28),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": sizes(2048, 5632, 24, 16, 16)
    | of("qwen2_moe", QWEN | QWEN_MOE, vocab_size=151936, max_position_embeddings=8192, moe_intermediate_size=1408)
    | {"shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": sizes(2048, 5120, 48, 16, 2)
    | of("qwen3_next", QWEN3 | QWEN_MOE | LINEAR, head_dim=256, rope_theta=1e7, partial_rotary_factor=0.25)
    | {"full_attention_interval": 4, "linear_num_value_heads": 32, "moe_intermediate_size": 512, "num_experts": 512}
    | {"num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144},
    "Qwen/Qwen3.5-4B": {
        **{"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": QWEN35},
        **{"image_token_id": 248056, "video_token_id": 248057},
        "vision_config": of("qwen3_5", QWEN_VISION, depth=24, hidden_size=1024, intermediate_size=4096, out_hidden_size=2560)
        | {"patch_size": 16, "deepstack_visual_indexes": []},
    },
    "Qwen/Qwen3.5-4B, text": QWEN35,
    "Qwen/Qwen3.5-35B-A3B": {
        **{"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "image_token_id": 248056, "video_token_id": 248057},
        "text_config": {name: value for name, value in QWEN35.items() if name != "intermediate_size"}
        | of("qwen3_5_moe_text", {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2})
        | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 10, "num_experts": 256, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1}
        | {"tie_word_embeddings": False},
        "vision_config": of("qwen3_5_moe", QWEN_VISION, depth=27, hidden_size=1152, intermediate_size=4304)
        | {"out_hidden_size": 2048, "patch_size": 16, "deepstack_visual_indexes": []},
    },
    "Qwen/Qwen3.8-Flash-Next": {"model_type": "qwen4_exp", "text_config": {"model_type": "qwen4_exp_text"}},
    "Qwen/Qwen2-VL-7B-Instruct": sizes(3584, 18944, 28, 28, 4)
    | of("qwen2_vl", QWEN | QWEN_IMAGES, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})
    | {"vision_config": QWEN_VISION | {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584}},
    "Qwen/Qwen2.5-VL-7B-Instruct": sizes(3584, 18944, 28, 28, 4)
    | of("qwen2_5_vl", QWEN | QWEN_IMAGES, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})
    | {
        "vision_config": QWEN_VISION
        | {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "window_size": 112}
        | {"fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu"}
    },
    "Qwen/Qwen3-VL-8B-Instruct": {
        **of("qwen3_vl", QWEN_IMAGES, tie_word_embeddings=False),
        "text_config": sizes(4096, 12288, 36, 32, 8)
        | of("qwen3_vl_text", QWEN3, rope_theta=5000000, max_position_embeddings=262144, rms_norm_eps=1e-6)
        | {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
        "vision_config": of("qwen3_vl", QWEN_VISION, depth=27, hidden_size=1152, intermediate_size=4304, out_hidden_size=4096)
        | {"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
    },
    "zai-org/GLM-OCR": {
        **{"model_type": "glm_ocr", "image_start_token_id": 59256, "image_end_token_id": 59257},
        **{"image_token_id": 59280, "video_token_id": 59281, "video_start_token_id": 59258, "video_end_token_id": 59259},
        "text_config": sizes(1536, 4608, 16, 16, 8)
        | of("glm_ocr_text", {"vocab_size": 59392, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5})
        | {"eos_token_id": [59246, 59253], "pad_token_id": 59246, "attention_bias": False, "num_nextn_predict_layers": 1}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0}}
        | {"tie_word_embeddings": False},
        "vision_config": of("glm_ocr_vision", {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2})
        | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 1536}
        | {"hidden_act": "silu", "attention_bias": True, "image_size": 336, "rms_norm_eps": 1e-5},
    },
    "PaddlePaddle/PaddleOCR-VL": sizes(1024, 3072, 18, 16, 2)
    | of("paddleocr_vl", {"vocab_size": 103424, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 500000})
    | {"rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, "rms_norm_eps": 1e-5}
    | {"image_token_id": 100295, "vision_start_token_id": 101305, "vision_end_token_id": 101306, "use_bias": False}
    | {"tie_word_embeddings": False, **code("paddleocr_vl", "PaddleOCRVL", "ForConditionalGeneration")}
    | {
        "vision_config": sizes(1152, 4304, 27, 16, 16)
        | of("paddleocr_vl", {"image_size": 384, "patch_size": 14, "spatial_merge_size": 2, "layer_norm_eps": 1e-6})
    },
    "google/gemma-3-4b-it": {
        **{"model_type": "gemma3", "mm_tokens_per_image": 256, "eos_token_id": [1, 106]},
        **{"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144},
        "text_config": {
            **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        },
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
            **{"num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False},
        },
    },
    "google/gemma-3n-E2B-it": {  # its text part
        **of("gemma3n_text", sizes(2048, [8192] * 30, 30, 8, 2), head_dim=256, vocab_size=262400, sliding_window=512),
        **{"activation_sparsity_pattern": [*[0.95] * 10, *[0.0] * 20], "altup_num_inputs": 4, "altup_coef_clip": 120.0},
        **{"final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256},
        **{"laurel_rank": 64, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6, "num_kv_shared_layers": 10},
        **{"max_position_embeddings": 32768, "rope_local_base_freq": 10000.0, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        **{"vocab_size_per_layer_input": 262144},
    },
    "google/gemma-4-E4B-it": {  # its text part, as far as its fields differ from the defaults of transformers
        **of("gemma4_text", sizes(2560, 10240, 42, 8, 2), head_dim=256, vocab_size=262144, sliding_window=512),
        **{"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
    },
    "microsoft/phi-2": sizes(2560, 10240, 32, 32, 32)
    | of("phi", {"vocab_size": 51200, "max_position_embeddings": 2048, "partial_rotary_factor": 0.4, "hidden_act": "gelu_new"})
    | {"qk_layernorm": False, "layer_norm_eps": 1e-5, "torch_dtype": "float16", "bos_token_id": 50256, "eos_token_id": 50256},
    "microsoft/Phi-3.5-MoE-instruct": sizes(4096, 6400, 32, 32, 8)
    | of("phimoe", longrope(64), vocab_size=32064, sliding_window=131072, attention_bias=True, lm_head_bias=True)
    | {"num_local_experts": 16, "num_experts_per_tok": 2, "input_jitter_noise": 0.01, "router_jitter_noise": 0.01}
    | {"rope_scaling": longrope(64)["rope_scaling"] | {"long_mscale": 1.243163121016122, "short_mscale": 1.243163121016122}}
    | code("phimoe", "PhiMoE"),
    "ibm-granite/granite-3.1-3b-a800m-instruct": sizes(1536, 512, 32, 24, 8)
    | of("granitemoe", GRANITE, attention_multiplier=0.015625, logits_scaling=6.0, num_local_experts=40)
    | {"num_experts_per_tok": 8, "vocab_size": 49155},
    "ibm-granite/granite-4.0-h-tiny": sizes(1536, 512, 40, 12, 4)
    | of("granitemoehybrid", GRANITE4, logits_scaling=6.0, shared_intermediate_size=1024, position_embedding_type="nope")
    | {"num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48}
    | {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4] * 4},
    "ibm-granite/granite-4.0-micro": sizes(2560, 8192, 40, 40, 8)
    | of("granitemoehybrid", GRANITE4, logits_scaling=10.0, shared_intermediate_size=8192, position_embedding_type="rope")
    | {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 80, "layer_types": ["attention"] * 40},
    "allenai/OLMo-1.7-7B-hf": sizes(4096, 11008, 32, 32, 32)
    | of("olmo", {"vocab_size": 50304, "max_position_embeddings": 4096, "rope_theta": 10000.0, "clip_qkv": 8.0}),
    "bigcode/starcoder2-3b": sizes(3072, 12288, 30, 24, 2)
    | of("starcoder2", {"vocab_size": 49152, "max_position_embeddings": 16384, "rope_theta": 999999.4420358813})
    | {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": 4096}
    | {"norm_type": "layer_norm", "mlp_type": "default", "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32"},
    "stabilityai/stablelm-2-1_6b-chat": sizes(2048, 5632, 24, 32, 32)
    | of("stablelm", STABLELM, use_qkv_bias=True, torch_dtype="float16"),
    "stabilityai/stablelm-2-12b-chat": sizes(5120, 13824, 40, 32, 8)
    | of("stablelm", STABLELM, qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=False),
    "CohereForAI/c4ai-command-r-v01": sizes(8192, 22528, 40, 64, 64)
    | of("cohere", COHERE, logit_scale=0.0625, rope_theta=8e6, use_qk_norm=False),
    "CohereForAI/c4ai-command-r-plus": sizes(12288, 33792, 64, 96, 8)
    | of("cohere", COHERE, logit_scale=0.8333333333333334, rope_theta=75e6, use_qk_norm=True),
    "CohereForAI/c4ai-command-r7b-12-2024": sizes(4096, 14336, 32, 32, 8)
    | of("cohere2", COHERE, head_dim=128, logit_scale=0.25, rope_theta=50000, torch_dtype="bfloat16", layer_switch=4)
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "order_of_interleaved_layers": "local_attn_first"}
    | {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_parallel_block": True},
    "deepseek-ai/DeepSeek-V2-Lite-Chat": sizes(2048, 10944, 27, 16, 16)
    | of("deepseek_v2", DEEPSEEK, moe_intermediate_size=1408, n_routed_experts=64, q_lora_rank=None, n_group=1, topk_group=1)
    | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    | {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
    | code("deepseek", "DeepseekV2"),
    "deepseek-ai/DeepSeek-V2-Chat": sizes(5120, 12288, 60, 128, 128)
    | of("deepseek_v2", DEEPSEEK, moe_intermediate_size=1536, n_routed_experts=160, n_group=8, topk_group=3)
    | {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    | {"routed_scaling_factor": 16.0, "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
    | code("deepseek", "DeepseekV2"),
    "unsloth/DeepSeek-V3-bf16": sizes(7168, 18432, 61, 128, 128)
    | of("deepseek_v3", DEEPSEEK_V3, vocab_size=129280, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1)
    | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"num_nextn_predict_layers": 1, "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    | code("deepseek", "DeepseekV3"),
    "moonshotai/Moonlight-16B-A3B-Instruct": sizes(2048, 11264, 27, 16, 16)
    | of("deepseek_v3", DEEPSEEK_V3, vocab_size=163840, moe_intermediate_size=1408, n_routed_experts=64, q_lora_rank=None)
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "rope_theta": 50000.0, "max_position_embeddings": 8192}
    | {"num_nextn_predict_layers": 0}
    | code("deepseek", "DeepseekV3"),
    "moonshotai/Kimi-K2-Instruct": sizes(7168, 18432, 61, 64, 64)
    | of("kimi_k2", DEEPSEEK_V3, vocab_size=163840, moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1)
    | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0}
    | {"rope_scaling": DEEPSEEK_YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    | code("deepseek", "DeepseekV3"),
    "rednote-hilab/dots.llm1.inst": sizes(4096, 10944, 62, 32, 32)
    | of("dots1", {"vocab_size": 152064, "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e7})
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    | {"scoring_func": "noaux_tc", "sliding_window": None, "max_window_layers": 62},
    "THUDM/glm-4-9b-chat-hf": sizes(4096, 13696, 40, 32, 2)
    | of("glm", GLM4, attention_bias=True, rms_norm_eps=1.5625e-07, rope_theta=10000.0)
    | {"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
    "THUDM/glm-4-9b-chat": of("chatglm", {"hidden_size": 4096, "num_layers": 40, "padded_vocab_size": 151552})
    | {"seq_length": 131072, "num_attention_heads": 32, "multi_query_group_num": 2, "ffn_hidden_size": 13696}
    | code("chatglm", "ChatGLM", "ForConditionalGeneration"),
    "zai-org/GLM-4-9B-0414": sizes(4096, 13696, 40, 32, 2)
    | of("glm4", GLM4, attention_bias=False, rms_norm_eps=1e-5, max_position_embeddings=32768)
    | {"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
    "zai-org/GLM-4.5-Air": sizes(4096, 10944, 46, 96, 8)
    | of("glm4_moe", GLM4, attention_bias=True, rms_norm_eps=1e-5, rope_theta=1000000, use_qk_norm=False)
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}
    | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    | {"num_nextn_predict_layers": 1, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
    "zai-org/GLM-4.7-Flash": sizes(2048, 10240, 47, 20, 20)
    | of("glm4_moe_lite", MLA, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, vocab_size=154880)
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1}
    | {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8}
    | {"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "rope_theta": 1000000, "max_position_embeddings": 202752}
    | {"rms_norm_eps": 1e-5, "attention_bias": False, "partial_rotary_factor": 1.0},
    "LGAI-EXAONE/EXAONE-4.0-1.2B": sizes(2048, 4096, 30, 32, 8)
    | of("exaone4", EXAONE4, head_dim=64, max_position_embeddings=65536, tie_word_embeddings=True, sliding_window=None)
    | {"layer_types": ["full_attention"] * 30, "sliding_window_pattern": None},
    "LGAI-EXAONE/EXAONE-4.0-32B": sizes(5120, 27392, 64, 40, 8)
    | of("exaone4", EXAONE4, head_dim=128, max_position_embeddings=131072, sliding_window=4096, sliding_window_pattern="LLLG")
    | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
    "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct": sizes(2560, 7168, 30, 32, 8)
    | of("exaone", {"vocab_size": 102400, "num_layers": 30, "head_dim": 80, "activation_function": "silu"})
    | {"max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": LLAMA3 | {"factor": 8.0}}
    | code("exaone", "Exaone"),
    "nvidia/Nemotron-Mini-4B-Instruct": sizes(3072, 9216, 32, 24, 8)
    | of("nemotron", {"vocab_size": 256000, "head_dim": 128, "max_position_embeddings": 4096, "rope_theta": 10000})
    | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "bos_token_id": 2, "eos_token_id": 3},
    "baichuan-inc/Baichuan2-7B-Chat": sizes(4096, 11008, 32, 32, 32)
    | of("baichuan", {"vocab_size": 125696, "max_position_embeddings": 4096, "model_max_length": 4096, "rms_norm_eps": 1e-6})
    | code("baichuan", "Baichuan"),
    "openbmb/MiniCPM-2B-sft-bf16": sizes(2304, 5760, 40, 36, 36)
    | of("minicpm", {"vocab_size": 122753, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4})
    | code("minicpm", "MiniCPM"),
    "openbmb/MiniCPM3-4B": sizes(2560, 6400, 62, 40, 40)
    | of("minicpm3", {"vocab_size": 73448, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "kv_lora_rank": 256})
    | {"q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "max_position_embeddings": 32768}
    | {"rope_scaling": longrope(16)["rope_scaling"] | {"original_max_position_embeddings": 32768}}
    | code("minicpm", "MiniCPM3"),
    "tiiuae/falcon-7b-instruct": of("falcon", FALCON, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71)
    | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False},
    "tiiuae/falcon-11B": of("falcon", FALCON, hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_kv_heads=8)
    | {"ffn_hidden_size": 16384, "new_decoder_architecture": True, "max_position_embeddings": 8192, "rope_theta": 500042.0},
    "tiiuae/falcon-rw-1b": of("falcon", FALCON, hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, alibi=True)
    | {"vocab_size": 50304, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False, "bias": True},
    "baidu/ERNIE-4.5-0.3B-PT": sizes(1024, 3072, 18, 16, 2)
    | of("ernie4_5", {"vocab_size": 103424, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 500000.0})
    | {"rms_norm_eps": 1e-5, "use_bias": False, "tie_word_embeddings": True}
    | code("ernie4_5", "Ernie4_5_", "ForCausalLM"),
    "baidu/ERNIE-4.5-21B-A3B-PT": sizes(2560, 12288, 28, 20, 4)
    | of("ernie4_5_moe", {"vocab_size": 103424, "max_position_embeddings": 131072, "rope_theta": 500000.0, "use_bias": False})
    | {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536, "moe_use_aux_free": True}
    | {"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_capacity": [64, 64, 64], "rms_norm_eps": 1e-5}
    | {"tie_word_embeddings": True},
    "tencent/Hunyuan-7B-Instruct": sizes(4096, 14336, 32, 32, 8)
    | of("hunyuan_v1_dense", {"vocab_size": 128167, "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 10000.0})
    | {"use_qk_norm": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}},
    "tencent/Hunyuan-A13B-Instruct": sizes(4096, 3072, 32, 32, 8)
    | of("hunyuan_v1_moe", {"vocab_size": 128167, "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 10000.0})
    | {"attention_head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32}
    | {"moe_intermediate_size": [3072] * 32, "use_mixed_mlp_moe": True, "use_qk_norm": True, "rms_norm_eps": 1e-5}
    | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    | {"tie_word_embeddings": True},
    "ByteDance-Seed/Seed-OSS-36B-Instruct": sizes(5120, 27648, 64, 80, 8)
    | of("seed_oss", {"vocab_size": 155136, "head_dim": 128, "max_position_embeddings": 524288, "rope_theta": 1e7})
    | {"attention_bias": True, "attention_out_bias": False, "rope_scaling": {"rope_type": "default"}, "rms_norm_eps": 1e-6},
    "LiquidAI/LFM2-1.2B": of("lfm2", {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32})
    | {
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "conv_L_cache": 3,
        "block_ff_dim": 12288,
    }
    | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "LiquidAI/LFM2.5-1.2B-Instruct": sizes(2048, 12288, 16, 32, 8)
    | of("lfm2", {"vocab_size": 65536, "max_position_embeddings": 128000, "rope_theta": 1000000.0, "norm_eps": 1e-5})
    | {"conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "block_auto_adjust_ff_dim": True, "block_use_swiglu": True}
    | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "tie_embedding": True, "eos_token_id": 7}
    | {
        "layer_types": [
            *["conv", "conv", "full_attention"] * 3,
            *["conv", "full_attention"] * 3,
            "conv",
        ]
    },
    "LiquidAI/LFM2-8B-A1B": sizes(2048, 7168, 24, 32, 8)
    | of("lfm2_moe", {"vocab_size": 65536, "max_position_embeddings": 128000, "conv_L_cache": 3, "num_experts": 32})
    | {"moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts_per_tok": 4, "norm_topk_prob": True}
    | {"layer_types": ["conv", "conv", *["full_attention", "conv", "conv", "conv"] * 5, "full_attention", "conv"]},
    "swiss-ai/Apertus-8B-Instruct-2509": sizes(4096, 21504, 32, 32, 8)
    | of("apertus", {"vocab_size": 131072, "max_position_embeddings": 65536, "rope_theta": 12000000, "hidden_act": "xielu"})
    | {"qk_norm": True, "post_norm": False, "rope_scaling": LLAMA3 | {"factor": 8.0}, "rms_norm_eps": 1e-5},
    "arcee-ai/AFM-4.5B": sizes(2560, 18432, 36, 20, 4)
    | of("arcee", {"vocab_size": 128004, "head_dim": 128, "max_position_embeddings": 65536, "rope_theta": 10000.0})
    | {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_scaling": DEEPSEEK_YARN | {"rope_type": "yarn", "factor": 20.0}},
    "arcee-ai/Trinity-Mini": sizes(2048, 6144, 32, 32, 4)
    | of("afmoe", {"vocab_size": 200192, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 10000})
    | {"moe_intermediate_size": 1024, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1}
    | {"num_dense_layers": 2, "sliding_window": 2048, "global_attn_every_n_layers": 4, "mup_enabled": True}
    | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "route_scale": 2.826, "score_func": "sigmoid"},
    "MiniMaxAI/MiniMax-M2": sizes(3072, 1536, 62, 48, 8)
    | of("minimax_m2", {"vocab_size": 200064, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5000000})
    | {"rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_qk_norm": True}
    | {"qk_norm_type": "per_layer", "use_routing_bias": True, "rms_norm_eps": 1e-6},
    "MiniMaxAI/MiniMax-Text-01-hf": sizes(6144, 9216, 80, 64, 8)
    | of("minimax", {"vocab_size": 200064, "head_dim": 128, "max_position_embeddings": 10240000, "rope_theta": 10000000})
    | {"num_local_experts": 32, "num_experts_per_tok": 2, "block_size": 256}
    | {"layer_types": [*["linear_attention"] * 7, "full_attention"] * 10},
    "unsloth/Llama-4-Scout-17B-16E-Instruct": LLAMA4_TEXT,  # its text part
    "openai-community/gpt2": {
        **of("gpt2", {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257}),
        **{"activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256, "torch_dtype": None},
    },
    "openai-community/openai-gpt": {
        **of(
            "openai-gpt", {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 512, "vocab_size": 40478, "afn": "gelu"}
        ),
        "torch_dtype": None,
    },
    "facebook/opt-125m": OPT
    | of("opt", {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12})
    | {"word_embed_proj_dim": 768, "do_layer_norm_before": True},
    "facebook/opt-350m": OPT
    | of("opt", {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16})
    | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "EleutherAI/pythia-160m": of("gpt_neox", {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12})
    | {"num_attention_heads": 12, "vocab_size": 50304, "max_position_embeddings": 2048, "rotary_pct": 0.25}
    | {"rotary_emb_base": 10000, "use_parallel_residual": True, "hidden_act": "gelu", "torch_dtype": "float16"}
    | {"bos_token_id": 0, "eos_token_id": 0},
    "EleutherAI/gpt-j-6b": of("gptj", {"n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64})
    | {"activation_function": "gelu_new", "vocab_size": 50400, "bos_token_id": 50256, "eos_token_id": 50256}
    | {"tie_word_embeddings": False, "torch_dtype": None},
    "EleutherAI/gpt-neo-125m": of("gpt_neo", {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "vocab_size": 50257})
    | {"attention_layers": ["global", "local"] * 6, "attention_types": [[["global", "local"], 6]], "window_size": 256}
    | {"activation_function": "gelu_new", "max_position_embeddings": 2048, "intermediate_size": None, "torch_dtype": None},
    "bigcode/starcoderbase-1b": of("gpt_bigcode", {"n_embd": 2048, "n_head": 16, "n_layer": 24, "n_inner": 8192})
    | {"n_positions": 8192, "vocab_size": 49152, "multi_query": True, "activation_function": "gelu_pytorch_tanh"}
    | {"bos_token_id": 0, "eos_token_id": 0, "torch_dtype": None},
    "bigscience/bloom-560m": of("bloom", {"n_embed": 1024, "hidden_size": 1024, "n_layer": 24, "num_attention_heads": 16})
    | {"vocab_size": 250880, "seq_length": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    | {"torch_dtype": None},
    "mosaicml/mpt-7b-chat": of(
        "mpt", {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "expansion_ratio": 4}
    )
    | {
        "vocab_size": 50432,
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"},
    }
    | code("mpt", "MPT"),
    "state-spaces/mamba-130m-hf": of("mamba", MAMBA, hidden_size=768, intermediate_size=1536, num_hidden_layers=24)
    | {"n_layer": 24, "state_size": 16, "time_step_rank": 48, "vocab_size": 50280, "torch_dtype": "float32"},
    "mistralai/Mamba-Codestral-7B-v0.1": of("mamba2", MAMBA, hidden_size=4096, num_heads=128, head_dim=64, n_groups=8)
    | {"num_hidden_layers": 64, "state_size": 128, "vocab_size": 32768},
    "tiiuae/falcon-mamba-7b-instruct": of("falcon_mamba", MAMBA, hidden_size=4096, intermediate_size=8192, state_size=16)
    | {"num_hidden_layers": 64, "time_step_rank": 256, "vocab_size": 65024},
    "ibm-ai-platform/Bamba-9B-v2": sizes(4096, 14336, 32, 32, 8)
    | of("bamba", {"attn_layer_indices": [9, 18, 27], "mamba_d_head": 64, "mamba_n_heads": 128, "mamba_d_state": 128})
    | {"vocab_size": 128256},
    "ai21labs/AI21-Jamba-Mini-1.6": sizes(4096, 14336, 32, 32, 8)
    | of("jamba", {"attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2})
    | {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "num_experts": 16}
    | {"num_experts_per_tok": 2, "vocab_size": 65536},
    "tiiuae/Falcon-H1-1.5B-Instruct": sizes(2048, 4096, 24, 8, 2)
    | of("falcon_h1", {"head_dim": 128, "mamba_d_ssm": 3072, "mamba_d_head": 64, "mamba_n_heads": 48, "mamba_d_state": 256})
    | {"vocab_size": 65537},
    "nvidia/Nemotron-H-8B-Reasoning-128K": sizes(4096, 21504, 52, 32, 8)
    | of("nemotron_h", {"head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8})
    | {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "vocab_size": 131072}
    | code("nemotron_h", "NemotronH"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": sizes(2688, 1856, 52, 32, 2)
    | of("nemotron_h", {"head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8})
    | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "vocab_size": 131072}
    | {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856}
    | {"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    | {"n_group": 1, "topk_group": 1, "time_step_limit": [0.0, math.inf], "max_position_embeddings": 262144}
    | code("nemotron_h", "NemotronH"),
    "allenai/Olmo-Hybrid-7B": sizes(3840, 11008, 32, 30, 30)
    | of("olmo_hybrid", {"vocab_size": 100352, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6})
    | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 8, "linear_allow_neg_eigval": True}
    | {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96, "linear_value_head_dim": 192}
    | {"linear_conv_kernel_dim": 4, "rope_parameters": None, "eos_token_id": 100257, "pad_token_id": 100277},
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": sizes(2304, 9216, 27, 32, 32)
    | of("kimi_linear", {"vocab_size": 163840, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64})
    | code("kimi", "KimiLinear"),
    "moonshotai/Kimi-K3": of("kimi_k3", {"text_config": {"model_type": "kimi_linear"}, "vision_config": {}})
    | code("kimi_k3", "KimiK3", "ForConditionalGeneration"),
    "zai-org/GLM-5.3-Flash": of("glm5_next", {"text_config": {"model_type": "glm5_next_text"}}),
    "NX-AI/xLSTM-7b": of("xlstm", {"hidden_size": 4096, "num_hidden_layers": 32, "num_heads": 8, "vocab_size": 50304}),
    "Zyphra/Zamba-7B-v1": of("zamba", {"hidden_size": 3712, "num_hidden_layers": 76, "num_attention_heads": 16}),
    "MiniMaxAI/MiniMax-Text-01": of("minimax_text_01", {"hidden_size": 6144, "num_hidden_layers": 80})
    | code("minimax_text_01", "MiniMaxText01"),
    "fla-hub/rwkv7-1.5B-world": of("rwkv7", {"hidden_size": 2048, "num_hidden_layers": 24}) | code("rwkv7", "RWKV7"),
    "Zyphra/Zamba2-1.2B-instruct": sizes(2048, 8192, 38, 32, 32)
    | of("zamba2", {"mamba_d_state": 128, "mamba_headdim": 64, "n_mamba_heads": 64, "mamba_ngroups": 1, "num_mem_blocks": 1})
    | {"vocab_size": 32000}
    | {"layers_block_type": [*["mamba"] * 5, "hybrid", *[*["mamba"] * 5, "hybrid"] * 5, "mamba", "mamba"]},
    "google/recurrentgemma-2b-it": of("recurrent_gemma", {"hidden_size": 2560, "intermediate_size": 15360, "lru_width": 2560})
    | {"num_attention_heads": 10, "num_key_value_heads": 1, "num_hidden_layers": 26, "attention_window_size": 2048}
    | {"block_types": ["recurrent", "recurrent", "attention"], "vocab_size": 256000},
    "RWKV/rwkv-4-169m-pile": of("rwkv", {"hidden_size": 768, "attention_hidden_size": 768, "num_hidden_layers": 12})
    | {"context_length": 1024, "vocab_size": 50277, "torch_dtype": "float32"},
    "google-t5/t5-small": of("t5", {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6})
    | {"is_encoder_decoder": True, "vocab_size": 32128, "decoder_start_token_id": 0, "torch_dtype": None},
    "kyutai/helium-1-2b": sizes(2048, 8192, 28, 16, 8)
    | of("helium", {"vocab_size": 64000, "head_dim": 128, "max_position_embeddings": 4096, "rope_theta": 20000.0})
    | {"rms_norm_eps": 1e-8, "tie_word_embeddings": False},
    "adept/persimmon-8b-chat": of("persimmon", {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 36})
    | {"num_attention_heads": 64, "vocab_size": 262144, "max_position_embeddings": 16384, "hidden_act": "relu2"}
    | {"qk_layernorm": True, "partial_rotary_factor": 0.5, "rope_theta": 25000.0, "layer_norm_eps": 1e-5},
    "Salesforce/codegen-350M-mono": of("codegen", {"n_embd": 1024, "n_head": 16, "n_layer": 20, "n_positions": 2048})
    | {"rotary_dim": 32, "vocab_size": 51200, "activation_function": "gelu_new", "torch_dtype": "float16"}
    | {"bos_token_id": 1, "eos_token_id": 50256, "tie_word_embeddings": False},
    "facebook/xglm-564M": of("xglm", {"d_model": 1024, "ffn_dim": 4096, "attention_heads": 16, "num_layers": 24})
    | {"vocab_size": 256008, "max_position_embeddings": 2048, "activation_function": "gelu", "scale_embedding": True}
    | {"torch_dtype": "float16", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2},
    "facebook/cwm": sizes(6144, 21504, 64, 48, 8)
    | of("cwm", {"vocab_size": 128256, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e6})
    | {"sliding_window": 8192, "layer_types": [*["full_attention"], *["sliding_attention"] * 3] * 16, "rms_norm_eps": 1e-5}
    | {"rope_scaling": LLAMA3 | {"factor": 16.0}},
    "databricks/dbrx-instruct": of("dbrx", {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768})
    | {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}, "vocab_size": 100352}
    | {
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "moe_jitter_eps": 0,
            "moe_loss_weight": 0.05,
            "moe_num_experts": 16,
            "moe_top_k": 4,
        }
    },
    "jetmoe/jetmoe-8b": of("jetmoe", {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24})
    | {"num_key_value_heads": 16, "kv_channels": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    | {"max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "microsoft/biogpt": sizes(1024, 4096, 24, 16, 16)
    | of("biogpt", {"vocab_size": 42384, "max_position_embeddings": 1024, "hidden_act": "gelu", "scale_embedding": True})
    | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "torch_dtype": None},
    "karpathy/nanochat-d32": sizes(2048, 8192, 32, 16, 16)
    | of("nanochat", {"vocab_size": 65536, "max_position_embeddings": 2048, "hidden_act": "relu2"})
    | {"final_logit_softcapping": 15.0, "attention_bias": False, "rms_norm_eps": 1e-6},
    "HuggingFaceTB/SmolVLM-256M-Instruct": {
        **{"model_type": "idefics3", "image_token_id": 49190, "scale_factor": 4, "tie_word_embeddings": False},
        "text_config": sizes(576, 1536, 30, 9, 3) | llama(49280, 8192, 100000, head_dim=64),
        "vision_config": of("idefics3_vision", {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12})
        | {"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
    },
}
OTHERS = {
    name: {field: value for field, value in ({"torch_dtype": "bfloat16"} | fields).items() if field != "torch_dtype" or value}
    for name, fields in _OTHERS.items()
}


def of_hub(name) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and generation_config.json (None: there is none) of a model on the hub."""
    return {**CONFIGS, **OTHERS}[name], GENERATION_CONFIGS.get(name)


# generation_config.json, as published.
def sampled(bos, eos, pad=None, **more):
    return (
        {"bos_token_id": bos, "eos_token_id": eos, "do_sample": True}
        | ({"pad_token_id": pad} if pad is not None else {})
        | more
    )


def greedy(bos, eos, **more):
    """As transformers makes it of config.json."""
    return {"_from_model_config": True, "bos_token_id": bos, "eos_token_id": eos} | more


QWEN_IDS = (151643, [151645, 151643], 151643)
QWEN25_SAMPLING = {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
QWEN3_SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
LLAMA31_IDS = (128000, [128001, 128008, 128009])
GEMMA3_SAMPLING = {"cache_implementation": "hybrid", "top_k": 64, "top_p": 0.95}
GLM_IDS = (None, [151329, 151336, 151338], 151329)
HUNYUAN = sampled(127958, 127960, 127961, top_k=20, top_p=0.8, repetition_penalty=1.05, temperature=0.7)
_GENERATION_CONFIGS = {
    "meta-llama/Llama-2-7b-chat-hf": sampled(1, 2, 0, temperature=0.6, top_p=0.9, max_length=4096),
    "meta-llama/Meta-Llama-3-8B-Instruct": sampled(128000, [128001, 128009], temperature=0.6, top_p=0.9, max_length=4096),
    "meta-llama/Llama-3.1-8B-Instruct": sampled(*LLAMA31_IDS, temperature=0.6, top_p=0.9),
    "meta-llama/Llama-3.2-1B-Instruct": sampled(*LLAMA31_IDS, temperature=0.6, top_p=0.9),
    "mistralai/Mistral-7B-Instruct-v0.1": greedy(1, 2),
    "mistralai/Mistral-7B-Instruct-v0.3": greedy(1, 2),
    "mistralai/Mistral-Nemo-Instruct-2407": greedy(1, 2),
    "mistralai/Mistral-Small-24B-Instruct-2501": sampled(1, 2, temperature=0.15),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": greedy(1, 2),
    "Qwen/Qwen2-7B-Instruct": sampled(*QWEN_IDS, **QWEN25_SAMPLING),
    "Qwen/Qwen2.5-7B-Instruct": sampled(*QWEN_IDS, **QWEN25_SAMPLING),
    "Qwen/Qwen2.5-14B-Instruct": sampled(*QWEN_IDS, **QWEN25_SAMPLING),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": sampled(*QWEN_IDS, **QWEN25_SAMPLING),
    "Qwen/Qwen3-8B": sampled(*QWEN_IDS, **QWEN3_SAMPLING),
    "Qwen/Qwen3-0.6B": sampled(*QWEN_IDS, **QWEN3_SAMPLING),
    "Qwen/Qwen3-30B-A3B": sampled(*QWEN_IDS, **QWEN3_SAMPLING),
    "Qwen/Qwen2.5-VL-7B-Instruct": sampled(*QWEN_IDS, repetition_penalty=1.05, temperature=1e-6),
    "Qwen/Qwen3-VL-8B-Instruct": sampled(*QWEN_IDS, top_p=0.8, top_k=20, temperature=0.7, repetition_penalty=1.0),
    "google/gemma-3-1b-it": sampled(2, [1, 106], 0, **GEMMA3_SAMPLING),
    "google/gemma-3-4b-it": sampled(2, [1, 106], 0, **GEMMA3_SAMPLING),
    "google/gemma-3n-E2B-it": sampled(2, [1, 106], 0, **GEMMA3_SAMPLING),
    "microsoft/phi-4": greedy(100257, [100257, 100265]),
    "microsoft/Phi-4-mini-instruct": greedy(199999, [200020, 199999], pad_token_id=199999),
    "ibm-granite/granite-3.3-2b-instruct": greedy(0, 0, pad_token_id=0),
    "HuggingFaceTB/SmolLM3-3B": sampled(128000, 128012, 128004, temperature=0.6, top_p=0.95),
    "allenai/Olmo-3-7B-Instruct": sampled(100257, 100257, temperature=0.6, top_p=0.95, max_new_tokens=32768),
    "CohereForAI/c4ai-command-r7b-12-2024": greedy(5, 255001, pad_token_id=0, cache_implementation="hybrid"),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": sampled(151646, 151643, temperature=0.6, top_p=0.95, _from_model_config=True),
    "deepseek-ai/DeepSeek-V2-Chat": sampled(100000, 100001, temperature=0.3, top_p=0.95),
    "unsloth/DeepSeek-V3-bf16": sampled(0, 1, temperature=0.6, top_p=0.95),
    "THUDM/glm-4-9b-chat-hf": sampled(*GLM_IDS, temperature=0.8, max_length=128000, top_p=0.8),
    "zai-org/GLM-4-9B-0414": sampled(*GLM_IDS, temperature=0.8, max_length=32768, top_p=0.8),
    "zai-org/GLM-4.5-Air": sampled(*GLM_IDS, temperature=0.6, top_p=0.95),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": sampled(1, 361, 0, temperature=0.6, top_p=0.95, presence_penalty=1.5),
    "LGAI-EXAONE/EXAONE-4.0-32B": sampled(1, 361, 0, temperature=0.6, top_p=0.95),
    "unsloth/gpt-oss-20b-BF16": sampled(199998, [200002, 199999, 200012], 199999),
    "baidu/ERNIE-4.5-0.3B-PT": sampled(1, 2, 0, temperature=0.8, top_p=0.8, repetition_penalty=1.0, presence_penalty=0.0),
    "tencent/Hunyuan-7B-Instruct": HUNYUAN,
    "tencent/Hunyuan-A13B-Instruct": HUNYUAN,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": sampled(0, 2, 1, temperature=1.1, top_p=0.95),
    "LiquidAI/LFM2-1.2B": sampled(1, 7, 0, temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    "MiniMaxAI/MiniMax-M2": sampled(200019, 200020, temperature=1.0, top_p=0.95, top_k=40),
    "unsloth/Llama-4-Scout-17B-16E-Instruct": sampled(200000, [200001, 200007, 200008], 200018, temperature=0.6, top_p=0.9),
    "openai-community/gpt2": greedy(50256, 50256),
    "bigcode/starcoder2-3b": greedy(0, 0),
}
GENERATION_CONFIGS = {
    name: {field: value for field, value in fields.items() if value is not None} for name, fields in _GENERATION_CONFIGS.items()
}
NO_DEFAULTS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "max_length",
    "max_new_tokens",
    "cache_implementation",
    "_from_model_config",
)


def sampling_defaults(generation_config):
    return {name: value for name, value in generation_config.items() if name not in NO_DEFAULTS}


# The name of a model for each set of defaults.
BY_DEFAULTS = {frozenset(sampling_defaults(fields)): name for name, fields in GENERATION_CONFIGS.items()}

# A request of each API that leaves the sampling to the model's defaults.
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
REQUESTS = {
    "/generate": {"inputs": "Hello", "parameters": {"max_new_tokens": 8}},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 8},
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 8},
    "/v1/messages": MESSAGES,
}
