"""The config.json of published models, as far as it decides what is computed, and the number of their parameters.

Facts of the files on the hub, but for the factors of longropes. `PARAMETERS` are counted there, so a wrong size is found.
"""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
QWEN = {"vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6, "use_sliding_window": False}
SMALL_QWEN = QWEN | {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
LONGROPE = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "vocab_size": 49159, "tie_word_embeddings": True}
GRANITE |= {"max_position_embeddings": 131072, "rope_theta": 1e7, "rms_norm_eps": 1e-5}
GEMMA = {"vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh"}
GEMMA2 = GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {"vocab_size": 262144, "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512}
GEMMA3 |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000}
GEMMA3 |= {"rope_theta": 1e6, "sliding_window_pattern": 6}
OLMO2 = {"vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6}
INTERNLM2 = {"vocab_size": 92544, "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "bias": False}
INTERNLM2 |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


def longrope(pairs):
    return LONGROPE | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [1.1] * pairs}}


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
    "internlm/internlm2_5-7b-chat": (7_737_708_544, sizes(4096, 14336, 32, 32, 8), of("internlm2", INTERNLM2)),
    "internlm/internlm2_5-20b-chat": (19_861_149_696, sizes(6144, 16384, 48, 48, 8), of("internlm2", INTERNLM2)),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        46_702_792_704,
        sizes(4096, 14336, 32, 32, 8),
        mistral(32000, 32768, 1e6) | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}
CONFIGS = {name: {**fields, **numbers, "torch_dtype": "bfloat16"} for name, (_count, numbers, fields) in _MODELS.items()}
PARAMETERS = {name: count for name, (count, _numbers, _fields) in _MODELS.items()}

# generation_config.json, as published.
QWEN_EOS = {"bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": True}
GENERATION_CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        **{"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    },
    "Qwen/Qwen2.5-7B-Instruct": QWEN_EOS | {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "Qwen/Qwen3-8B": QWEN_EOS | {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "google/gemma-3-1b-it": {
        **{"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "cache_implementation": "hybrid"},
        **{"do_sample": True, "top_k": 64, "top_p": 0.95},
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
    "microsoft/phi-4": {"_from_model_config": True, "bos_token_id": 100257, "eos_token_id": [100257, 100265]},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {
        **{"_from_model_config": True, "bos_token_id": 151646, "eos_token_id": 151643},
        **{"do_sample": True, "temperature": 0.6, "top_p": 0.95},
    },
    "LGAI-EXAONE/EXAONE-4.0-1.2B": {
        **{"bos_token_id": 1, "eos_token_id": 361, "pad_token_id": 0, "do_sample": True},
        **{"temperature": 0.6, "top_p": 0.95, "presence_penalty": 1.5},
    },
    "zai-org/GLM-4-9B-0414": {
        **{"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
        **{"do_sample": True, "temperature": 0.8, "max_length": 32768, "top_p": 0.8},
    },
    "LiquidAI/LFM2-1.2B": {
        **{"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0, "do_sample": True},
        **{"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05},
    },
    "MiniMaxAI/MiniMax-M2": {
        **{"bos_token_id": 200019, "eos_token_id": 200020, "do_sample": True},
        **{"temperature": 1.0, "top_p": 0.95, "top_k": 40},
    },
    "openai/gpt-oss-20b": {
        **{"bos_token_id": 199998, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999},
        **{"do_sample": True},
    },
}
