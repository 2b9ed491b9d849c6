"""Tiny random models with recurrent states, made with transformers 5, and what it computes for texts.

python recurrent_models.py FOLDER     saves each of them with reference.pt: `texts` [texts, tokens]; of these `logits` [texts,
tokens, vocabulary] in float32, `bfloat16` as the model computes in that, `int8` of matrices that are rounded to it; `answers`:
prompts, and what greedy decoding continues them with; `conversations`: of each turn the prompt, the borders of its messages and
the answer.
"""

import copy
import sys
from pathlib import Path

import family_models
import torch
import transformers
from family_models import VOCABULARY
from safetensors.torch import save_file

LENGTH = 200
SMALL = family_models.SMALL | {
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False}
GRANITE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.09,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GROUPS = {"mamba_n_groups": 2, "position_embedding_type": "rope", "attention_bias": True, "tie_word_embeddings": True}
EXPERTS = {
    "linear_num_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MODELS = {
    "qwen3_5, grouped": ("Qwen3_5TextConfig", {"linear_num_value_heads": 12}),  # three value heads for a key head
    "qwen3_5, tied": ("Qwen3_5TextConfig", {"linear_num_value_heads": 4, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2Config", CONV | {"block_auto_adjust_ff_dim": False}),
    "lfm2, tied": ("Lfm2Config", CONV | {"block_multiple_of": 40, "conv_L_cache": 4, "tie_word_embeddings": True}),
    "granite 4": ("GraniteMoeHybridConfig", GRANITE),
    "granite 4, groups": ("GraniteMoeHybridConfig", GRANITE | GROUPS),
    "granite 4, experts": (
        "GraniteMoeHybridConfig",
        GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48},  # and an MLP of twice the size
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", EXPERTS | {"shared_expert_intermediate_size": 48}),
}
RATES = (-6.0, 2.7)  # of logarithms of decays: some heads forget at once, others keep nearly everything


def make(name):
    torch.manual_seed(0)
    config_class, values = MODELS[name]
    config = getattr(transformers, config_class)(**SMALL | values)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if key.endswith("A_log"):
                parameter.uniform_(*RATES)
            if key.endswith(("dt_bias", "mamba.D")):
                parameter.normal_(0, 1)
            if key.endswith(("conv1d.weight", "conv1d.bias", "conv.conv.weight", "proj.bias")):
                parameter.normal_(0, 0.5)
    return model


def texts():
    """One repeats a token, one repeats three: keys that are alike, the hardest case of a triangular system."""
    chance = torch.Generator().manual_seed(1)
    made = torch.randint(3, VOCABULARY, (6, LENGTH), generator=chance)
    made[1] = 7
    made[2] = made[2, :3].repeat(LENGTH)[:LENGTH]
    return made


def logits_of(model):
    with torch.inference_mode():
        return torch.cat([model(text[None], use_cache=False).logits.float() for text in texts()])


def rounded_to_int8(model):
    """With a scale for each row of a matrix, of `down` over all experts; gates of attentions, every second half of a head's
    rows in q_proj, and of shared experts stay."""
    rounded = copy.deepcopy(model)
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(
            ("lm_head", "shared_expert_gate", "shared_expert.down_proj", "shared_mlp.output_linear")
        ):
            before = module.weight.data.clone()
            round_together([module.weight.data])
            if name.endswith("q_proj") and "qwen" in model.config.model_type:
                by_head = (-1, 2, model.config.head_dim, before.shape[1])
                module.weight.data.view(by_head)[:, 1] = before.view(by_head)[:, 1]
        if hasattr(module, "shared_expert"):
            round_together([module.experts.gate_up_proj.data.flatten(0, 1)])
            round_together([*module.experts.down_proj.data, module.shared_expert.down_proj.weight.data])
        if hasattr(module, "shared_mlp"):
            down = [module.shared_mlp.output_linear.weight.data]
            if module.block_sparse_moe:
                round_together([module.block_sparse_moe.experts.gate_up_proj.data.flatten(0, 1)])
                down += module.block_sparse_moe.experts.down_proj.data
            round_together(down)
    return rounded


def round_together(matrices):
    scale = torch.cat(matrices, 1).abs().amax(1, keepdim=True) / 127
    for matrix in matrices:
        matrix.copy_((matrix / scale).round() * scale)


def greedy(model, prompt, count):
    tokens, cache = list(prompt), None
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count:
            output = model(torch.tensor([tokens[-1:] if cache else tokens]), past_key_values=cache, use_cache=True)
            tokens.append(output.logits[0, -1].argmax().item())
            cache = output.past_key_values
    return tokens[len(prompt) :]


def answers(model):
    chance = torch.Generator().manual_seed(2)
    for n, length in enumerate((5, 1, 37, 8, 64, 21, 100, 32, 33, 2)):
        prompt = torch.randint(3, VOCABULARY, (length,), generator=chance).tolist()
        yield prompt, greedy(model, prompt, 5 + 7 * n % 30)


def conversations(model):
    """Turns whose reasoning, the first half of an answer, is not in the next prompt; they begin with the same message."""
    chance = torch.Generator().manual_seed(3)

    def message(length):
        return torch.randint(3, VOCABULARY, (length,), generator=chance).tolist()

    system = message(9)
    for _ in range(4):
        text, turns = list(system), []
        for length in (19, 4, 33):
            before = len(text)
            text += message(length)
            prompt = [*text, 5, 6, 7]
            answer = greedy(model, prompt, 14)
            turns.append((prompt, sorted({len(system), before, len(text)}), answer))
            text += [5, 6, *answer[7:]]
        yield turns


if __name__ == "__main__":
    for name in MODELS:
        model = make(name)
        model.save_pretrained(Path(sys.argv[1], name))
        if (
            name == "qwen3_5_moe"
        ):  # published with the experts of a layer in one tensor, which transformers saves each by itself
            save_file(model.state_dict(), Path(sys.argv[1], name, "model.safetensors"))
        kept = {"texts": texts(), "logits": logits_of(model), "answers": [*answers(model)]}
        kept["conversations"] = [*conversations(model)]
        kept["int8"] = logits_of(rounded_to_int8(model))
        kept["bfloat16"] = logits_of(copy.deepcopy(model).bfloat16())
        torch.save(kept, Path(sys.argv[1], name, "reference.pt"))
