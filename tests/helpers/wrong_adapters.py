"""LoRA adapters that cannot be loaded at run time."""

import json
import os
import socket

import torch
from safetensors.torch import save_file


def written(folder, config, tensors):
    """A folder with an adapter of these settings and tensors."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config))


def wrong_adapters(folder, size):
    """Names of folders, each with an adapter that cannot be loaded, and what the error says. They change q_proj of a layer of a
    model with this hidden size."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    down, up = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
    fits = {down: torch.zeros(4, size), up: torch.zeros(size, 4)}
    shapes = {
        "two ranks": {down: torch.zeros(3, size)},
        "no rank": {down: torch.zeros(0, size), up: torch.zeros(size, 0)},
        "one dimension": {down: torch.zeros(size)},
        "three dimensions": {up: torch.zeros(size, 4, 1)},
        "other type": {up: torch.zeros(size, 4, dtype=torch.int8)},
        "other outputs": {up: torch.zeros(size + 1, 4)},
        "other inputs": {down: torch.zeros(4, size + 1)},
        "infinite": {up: torch.full((size, 4), torch.inf)},
        "rank 17": {down: torch.zeros(17, size), up: torch.zeros(size, 17)},
        "rank 20000": {down: torch.zeros(20000, 1), up: torch.zeros(1, 20000)},
        "no B": {up: None},
        "two spellings": {down.removeprefix("base_model.model."): torch.zeros(4, size)},
        "long": {"q_proj\n\x1b[31m" + 3000 * "x" + ".lora_A.weight": torch.zeros(4, size)},
    }
    for name, tensors in shapes.items():
        kept = {key: tensor for key, tensor in (fits | tensors).items() if tensor is not None}
        written(folder / name, {}, kept)
        said = "--max-lora-rank (MAX_LORA_RANK) is 16" if name.startswith("rank") else "q_proj"
        yield name, said
    configs = {
        "redos": ({"alpha_pattern": {"(([a-z_.0-9])+)+!": 1}}, "`alpha_pattern` take longer than 2 s"),
        "no pattern": ({"alpha_pattern": {"(": 1}}, "missing )"),
        "no patterns": ({"alpha_pattern": [1]}, "`alpha_pattern` is [1], and not an object"),
        "one number": ({"alpha_pattern": 5}, "`alpha_pattern` is 5, and not an object"),
        "no number": ({"lora_alpha": "8"}, "`lora_alpha` or `alpha_pattern` has '8' in the place of a number"),
        "no value": ({"alpha_pattern": {"q_proj": None}}, "has None in the place of a number"),
        "endless": ({"lora_alpha": 10**400}, "in the place of a number"),
        "line breaks": ({"init_lora_weights": "\n\x1b[31mINFO all is well\n" + "x" * 100_000}, "\\n\\x1b[31mINFO"),
    }
    for name, (config, said) in configs.items():
        written(folder / name, config, fits)
        yield name, said
    for name, file in (("FIFO", "adapter_config.json"), ("device", "adapter_model.safetensors"), ("socket", "adapter_x")):
        written(folder / name, {}, fits)
        path = folder / name / file
        path.unlink(missing_ok=True)
        if name == "FIFO":
            os.mkfifo(path)
        elif name == "device":
            path.symlink_to("/dev/zero")
        else:
            socket.socket(socket.AF_UNIX).bind(str(path))
        yield name, f"{path} is a {name}, and only regular files are read"
