"""The families that people publish, and what each must do here: the engine that serves it on a CPU, or why it is refused.

A row is a published model of `configs.py`, with what is changed in its config.json for a form that others publish. The table
of docs/models.md is made of these rows (`python tests/documents.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import vision_models

from published.configs import of_hub

OPENVINO = "openvino"
TORCH = "torch"


@dataclass(frozen=True)
class Family:
    """`engine` serves it in float32, `default_engine` in the default dtype; `refused`: the words of the reason instead."""

    name: str
    model: str
    engine: str = OPENVINO
    default_engine: str = OPENVINO
    refused: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the random weights; another one where tokens do not lead clearly
    images: str = ""  # the family of vision_models.py whose preprocessor, template and tokens it has; "": it is served as text

    @property
    def id(self) -> str:
        return re.sub(r"[ ,]+", "-", self.name.lower())

    @property
    def config(self) -> dict[str, Any]:
        return of_hub(self.model)[0] | self.changes

    @property
    def vision(self) -> vision_models.Family:
        return vision_models.FAMILIES[self.images]()

    @property
    def generation_config(self) -> dict[str, Any] | None:
        return of_hub(self.model)[1]


def served(name, model, engine=OPENVINO, default_engine=None, **changes):
    return Family(name, model, engine, default_engine or engine, changes=changes)


def refused(name, model, words, **changes):
    return Family(name, model, refused=words, changes=changes)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CODE = "come with Python code; --trust-remote-code (TRUST_REMOTE_CODE) runs it"
CHANNEL_DECAY = "linear attention that decays by channel"

FAMILIES = [
    served("Llama 2", "meta-llama/Llama-2-7b-chat-hf"),
    served("Llama 3", "meta-llama/Meta-Llama-3-8B-Instruct"),
    served("Llama 3.1", "meta-llama/Llama-3.1-8B-Instruct"),
    served("Llama 3.2", "meta-llama/Llama-3.2-1B-Instruct"),
    served("Llama with biases", "meta-llama/Meta-Llama-3-8B-Instruct", attention_bias=True, mlp_bias=True, head_dim=256),
    served("DeepSeek Coder", "deepseek-ai/deepseek-coder-6.7b-instruct"),
    served(
        "Llama with dynamic rope",
        "meta-llama/Llama-2-7b-chat-hf",
        rope_scaling={"type": "dynamic", "factor": 4.0},
        max_position_embeddings=2048,
    ),
    served("Falcon 3", "tiiuae/Falcon3-7B-Instruct"),
    served("Mistral 7B v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
    served("Mistral 7B v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    served("Mistral Nemo", "mistralai/Mistral-Nemo-Instruct-2407"),
    served("Mistral Small 24B", "mistralai/Mistral-Small-24B-Instruct-2501"),
    served("Ministral 8B", "mistralai/Ministral-8B-Instruct-2410"),
    served(
        "Ministral 8B, by its own type",
        "mistralai/Ministral-8B-Instruct-2410",
        model_type="ministral",
        max_position_embeddings=131072,
        layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
    ),
    served("Ministral 3, text", "mistralai/Ministral-3-8B-Instruct-2512"),
    served("Mistral Small 3.1", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),
    served("Mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    served("Qwen2", "Qwen/Qwen2-7B-Instruct"),
    served("Qwen2.5", "Qwen/Qwen2.5-7B-Instruct"),
    served("Qwen2.5 with yarn", "Qwen/Qwen2.5-14B-Instruct", rope_scaling=YARN),
    served(
        "Qwen2 with sliding windows",
        "Qwen/Qwen2-7B-Instruct",
        use_sliding_window=True,
        sliding_window=32768,
        max_position_embeddings=131072,
        max_window_layers=14,
    ),
    served("Qwen3", "Qwen/Qwen3-8B"),
    served("Qwen3, tied", "Qwen/Qwen3-0.6B"),
    served("Qwen3 with yarn", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
    served("Qwen3 MoE", "Qwen/Qwen3-30B-A3B"),
    served("Qwen1.5 MoE", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    served("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    Family("Qwen3.5", "Qwen/Qwen3.5-4B", images="qwen3_5"),
    served("Qwen3.5, text", "Qwen/Qwen3.5-4B, text"),
    served("Qwen3.5 MoE", "Qwen/Qwen3.5-35B-A3B"),
    refused("Qwen3.8 Flash Next", "Qwen/Qwen3.8-Flash-Next", "indexed attention"),
    served("Qwen3.5 of full attention", "Qwen/Qwen3.5-4B, text", layer_types=["full_attention"] * 32),
    served("Gemma", "google/gemma-2b-it"),
    served("Gemma 2", "google/gemma-2-2b-it", TORCH),
    served("Gemma 3 1B", "google/gemma-3-1b-it"),
    served("Gemma 3 4B", "google/gemma-3-4b-it"),
    served("Gemma 3n, text", "google/gemma-3n-E2B-it"),
    served("Gemma 4, text", "google/gemma-4-E4B-it"),
    served("Phi-2", "microsoft/phi-2"),
    served("Phi-3 4K", "microsoft/Phi-3-mini-4k-instruct"),
    served("Phi-3.5 mini", "microsoft/Phi-3.5-mini-instruct"),
    served(
        "Phi-3 128K, first revision",
        "microsoft/Phi-3.5-mini-instruct",
        rope_scaling={**of_hub("microsoft/Phi-3.5-mini-instruct")[0]["rope_scaling"], "type": "su"},
    ),
    served("Phi-3.5 MoE", "microsoft/Phi-3.5-MoE-instruct"),
    served("Phi-4", "microsoft/phi-4"),
    served("Phi-4 mini", "microsoft/Phi-4-mini-instruct"),
    served("Granite 3", "ibm-granite/granite-3.3-2b-instruct"),
    served("Granite 3 MoE", "ibm-granite/granite-3.1-3b-a800m-instruct"),
    served("Granite 4 hybrid", "ibm-granite/granite-4.0-h-tiny"),
    served("Granite 4 dense", "ibm-granite/granite-4.0-micro"),
    served("OLMo", "allenai/OLMo-1.7-7B-hf"),
    served("OLMo 2", "allenai/OLMo-2-0425-1B-Instruct"),
    served("OLMoE", "allenai/OLMoE-1B-7B-0924-Instruct"),
    served("OLMo 3", "allenai/Olmo-3-7B-Instruct"),
    served("SmolLM3", "HuggingFaceTB/SmolLM3-3B"),
    served("StarCoder2", "bigcode/starcoder2-3b"),
    served("StableLM 2 1.6B", "stabilityai/stablelm-2-1_6b-chat"),
    served("StableLM 2 12B", "stabilityai/stablelm-2-12b-chat"),
    served("Command R", "CohereForAI/c4ai-command-r-v01"),
    served("Command R+", "CohereForAI/c4ai-command-r-plus"),
    served("Command R7B", "CohereForAI/c4ai-command-r7b-12-2024"),
    served("DeepSeek V2 Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    served("DeepSeek V2", "deepseek-ai/DeepSeek-V2-Chat"),
    served("DeepSeek V3", "unsloth/DeepSeek-V3-bf16"),
    served("Moonlight", "moonshotai/Moonlight-16B-A3B-Instruct"),
    refused("Kimi Linear", "moonshotai/Kimi-Linear-48B-A3B-Instruct", CHANNEL_DECAY),
    refused("Kimi K3", "moonshotai/Kimi-K3", CHANNEL_DECAY),
    refused("GLM-5.3 Flash", "zai-org/GLM-5.3-Flash", CHANNEL_DECAY),
    refused("Kimi K2", "moonshotai/Kimi-K2-Instruct", CODE),
    served("dots.llm1", "rednote-hilab/dots.llm1.inst"),
    served("GLM-4 9B", "THUDM/glm-4-9b-chat-hf"),
    refused("ChatGLM", "THUDM/glm-4-9b-chat", CODE),
    served("GLM-4 0414", "zai-org/GLM-4-9B-0414"),
    served("GLM-4.5", "zai-org/GLM-4.5-Air"),
    served("GLM-4.7 Flash", "zai-org/GLM-4.7-Flash"),
    served("EXAONE 4 1.2B", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    served("EXAONE 4 32B", "LGAI-EXAONE/EXAONE-4.0-32B"),
    refused("EXAONE 3.5", "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", CODE),
    served("Nemotron", "nvidia/Nemotron-Mini-4B-Instruct"),
    refused("InternLM 2.5", "internlm/internlm2_5-7b-chat", CODE),
    refused("Baichuan 2", "baichuan-inc/Baichuan2-7B-Chat", CODE),
    refused("MiniCPM", "openbmb/MiniCPM-2B-sft-bf16", CODE),
    served("MiniCPM3", "openbmb/MiniCPM3-4B"),
    served("Falcon 7B", "tiiuae/falcon-7b-instruct", TORCH),
    served("Falcon 2 11B", "tiiuae/falcon-11B", TORCH),
    refused("Falcon RW", "tiiuae/falcon-rw-1b", "ALiBi"),
    served("gpt-oss", "unsloth/gpt-oss-20b-BF16"),
    served("ERNIE 4.5 0.3B", "baidu/ERNIE-4.5-0.3B-PT"),
    served("ERNIE 4.5 21B", "baidu/ERNIE-4.5-21B-A3B-PT"),
    served("Hunyuan 7B", "tencent/Hunyuan-7B-Instruct"),
    served("Hunyuan A13B", "tencent/Hunyuan-A13B-Instruct"),
    served("Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    served("LFM2", "LiquidAI/LFM2-1.2B"),
    served("LFM2.5", "LiquidAI/LFM2.5-1.2B-Instruct"),
    served("Apertus", "swiss-ai/Apertus-8B-Instruct-2509"),
    served("AFM 4.5B", "arcee-ai/AFM-4.5B"),
    served("MiniMax M2", "MiniMaxAI/MiniMax-M2"),
    served("Llama 4, text", "unsloth/Llama-4-Scout-17B-16E-Instruct"),
    served("GPT-2", "openai-community/gpt2"),
    served("OPT 125M", "facebook/opt-125m"),
    served("OPT 350M", "facebook/opt-350m"),
    served("Pythia", "EleutherAI/pythia-160m"),
    served("StarCoder", "bigcode/starcoderbase-1b"),
    served("GPT-J", "EleutherAI/gpt-j-6b", TORCH),
    refused("GPT-Neo", "EleutherAI/gpt-neo-125m", "local layers"),
    refused("BLOOM", "bigscience/bloom-560m", "ALiBi"),
    served("MPT", "mosaicml/mpt-7b-chat", TORCH),
    served("Mamba", "state-spaces/mamba-130m-hf"),
    served("Mamba 2", "mistralai/Mamba-Codestral-7B-v0.1"),
    served("Falcon Mamba", "tiiuae/falcon-mamba-7b-instruct"),
    served("Bamba", "ibm-ai-platform/Bamba-9B-v2"),
    served("Jamba", "ai21labs/AI21-Jamba-Mini-1.6"),
    served("Falcon H1", "tiiuae/Falcon-H1-1.5B-Instruct"),
    served("Nemotron H", "nvidia/Nemotron-H-8B-Reasoning-128K"),
    served("Nemotron 3 Nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    served("OLMo Hybrid", "allenai/Olmo-Hybrid-7B"),
    refused("Zamba", "Zyphra/Zamba-7B-v1", "attention shared by layers"),
    refused("Zamba 2", "Zyphra/Zamba2-1.2B-instruct", "attention shared by layers"),
    refused("RecurrentGemma", "google/recurrentgemma-2b-it", "recurrent layers"),
    refused("RWKV", "RWKV/rwkv-4-169m-pile", "recurrent layers"),
    refused("RWKV 7", "fla-hub/rwkv7-1.5B-world", "recurrent layers"),
    refused("xLSTM", "NX-AI/xLSTM-7b", "recurrent layers"),
    served("Qwen3-VL", "Qwen/Qwen3-VL-8B-Instruct"),
    served("Qwen2.5-VL", "Qwen/Qwen2.5-VL-7B-Instruct"),
    refused("T5", "google-t5/t5-small", "encoder-decoder"),
    # Others of transformers.
    served("Qwen2-VL", "Qwen/Qwen2-VL-7B-Instruct"),
    served("GLM-OCR", "zai-org/GLM-OCR"),
    served("PaddleOCR-VL", "PaddlePaddle/PaddleOCR-VL"),
    served("SmolVLM", "HuggingFaceTB/SmolVLM-256M-Instruct"),
    served("Helium", "kyutai/helium-1-2b"),
    served("Persimmon", "adept/persimmon-8b-chat"),
    served("CodeGen", "Salesforce/codegen-350M-mono", TORCH),
    refused("XGLM", "facebook/xglm-564M", "attention code of its own"),
    served("BioGPT", "microsoft/biogpt"),
    refused("GPT", "openai-community/openai-gpt", "layers without a KV cache"),
    served("CWM", "facebook/cwm"),
    Family("DBRX", "databricks/dbrx-instruct", TORCH, TORCH, seed=1),
    served("JetMoE", "jetmoe/jetmoe-8b", TORCH),
    served("nanochat", "karpathy/nanochat-d32"),
    served("Trinity", "arcee-ai/Trinity-Mini"),
    served("LFM2 MoE", "LiquidAI/LFM2-8B-A1B"),
    refused("MiniMax-01", "MiniMaxAI/MiniMax-Text-01-hf", "lightning attention"),
    refused("MiniMax-01 with its own code", "MiniMaxAI/MiniMax-Text-01", "lightning attention"),
]

# One family for each mechanism, for `make test`.
MECHANISMS = {
    "grouped query heads, llama3 rope": "Llama 3.1",
    "norms of heads": "Qwen3, tied",
    "sliding windows, norms after, text of an image model": "Gemma 3 4B",
    "capped scores: plain PyTorch": "Gemma 2",
    "fused projections, longrope": "Phi-4 mini",
    "parallel blocks, layer norm": "Command R7B",
    "experts": "Qwen3 MoE",
    "shared experts, latent attention, yarn": "DeepSeek V2",
    "learned positions": "GPT-2",
    "multipliers": "Granite 3",
    "sinks": "gpt-oss",
    "mrope": "Qwen2.5-VL",
    "attention shared by layers: refused": "Zamba 2",
    "linear attention": "Qwen3.5, text",
    "short convolutions": "LFM2",
    "state spaces": "Granite 4 hybrid",
}
assert len({family.id for family in FAMILIES}) == len(FAMILIES) and {*MECHANISMS.values()} <= {f.name for f in FAMILIES}
