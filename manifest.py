"""What a model folder says: its config.json and generation_config.json, and whether it holds the weights that
it describes.

A model folder is trusted. The checks here give a broken one a one-line error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run import ConfigError, Json

SAFETENSORS = ("*.safetensors",)
SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"  # files of a model, with an index or without
# A folder with a file for each tensor: save_pretrained_split of transformers-neuronx.
SPLIT_WEIGHTS = "pytorch_model.bin"
# The first of these that a checkpoint has is read; the latter two are pickled.
WEIGHTS = (*SAFETENSORS, f"{SPLIT_WEIGHTS}/*", "pytorch_model*.bin")
COMPUTED = 100_000_000  # parameters that need no file, such as tables of positions
ENDLESS = {"b": "a device", "c": "a device", "p": "a FIFO", "s": "a socket"}  # by their letter of `ls`
MAX_JSON = 50_000_000  # characters; an index of weights has a few million
LFS_POINTER = b"version https://git-lfs"
CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
ORIGINAL_LENGTH = "original_max_position_embeddings"  # before rope was scaled
GGUF_FILE = "gguf_file"  # of the config.json of a folder without weights, which gguf_folder.py writes
TEMPLATE_ORIGIN = "chat_template_origin"  # of its tokenizer_config.json: what the file calls its template
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # whose positions depend on the longest sequence

# Values of transformers' classes for keys that a vision-language model's text_config may leave out, such as
# Gemma 3 4B's context length.
TEXT_FIELDS = (
    "max_position_embeddings",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
TEXT_DEFAULTS = {
    kind: dict(zip(TEXT_FIELDS, values))
    for kind, values in {
        "gemma3_text": (131072, 262208, 2304, 9216, 26, 8, 4, 256),
        "granite": (2048, 32000, 4096, 11008, 32, 32),
        "llama": (2048, 32000, 4096, 11008, 32, 32),
        "mistral": (131072, 32000, 4096, 14336, 32, 32, 8),
        "qwen2": (32768, 151936, 4096, 22016, 32, 32, 32),
        "qwen3": (32768, 151936, 4096, 22016, 32, 32, 32, 128),
    }.items()
}
VISION_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
    "hidden_act",
    "layer_norm_eps",
)


def _vision_defaults(*values: Any) -> Json:
    return dict(zip(VISION_FIELDS, values))


# The same for a vision_config, of towers that several families have.
VISION_DEFAULTS = {
    "clip_vision_model": _vision_defaults(768, 3072, 12, 12, 224, 32, "quick_gelu", 1e-5),
    "siglip_vision_model": _vision_defaults(768, 3072, 12, 12, 224, 16, "gelu_pytorch_tanh", 1e-6),
    "pixtral": _vision_defaults(1024, 4096, 24, 16, 1024, 16, "gelu", 1e-5),
}


@dataclass(frozen=True)
class VisionFamily:
    """A family of vision-language models whose images are read; of other families, only the text part is
    served.

    A new family is a row of VISION_FAMILIES. If no class has its layout or its tower, that class is new, too.
    """

    # By the class of transformers' image processor: the class in text/images/layouts.py.
    layouts: dict[str, str]
    tower: str = "ProjectedTower"  # the class in models/images/towers.py
    # Values of transformers' class for keys that config.json may leave out. Of them are which layer's output
    # the projector reads, and whether it reads all of that or ("default") all but the first token.
    defaults: Json = field(default_factory=dict)
    vision_defaults: Json = field(default_factory=dict)  # the same for its vision_config
    whole_images: bool = False  # the tokens of an image attend to each other: all of them run in one call
    on_neuron: bool = False


TEXT_ONLY = VisionFamily({})
ANY_RESOLUTION = {"LlavaNextImageProcessor": "AnyResolution", "LlavaOnevisionImageProcessor": "AnyResolution"}
PIXEL_BOUNDS = {"Qwen2VLImageProcessor": "PixelBounds"}
BEFORE_LAST = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
MISTRAL = {"vision_feature_layer": -1, "spatial_merge_size": 2}
IDEFICS = VisionFamily(
    {"Idefics3ImageProcessor": "RowsAndColumns", "SmolVLMImageProcessor": "RowsAndColumns"},
    vision_defaults=_vision_defaults(1152, 3072, 12, 16, 224, 32, "gelu_pytorch_tanh", 1e-6),
    on_neuron=True,
)
QWEN35 = VisionFamily(PIXEL_BOUNDS, tower="QwenTower", vision_defaults={"hidden_act": "gelu_pytorch_tanh"})
VISION_FAMILIES = {  # by the model_type
    "llava": VisionFamily(
        {
            "CLIPImageProcessor": "CenterCrop",
            "SiglipImageProcessor": "Square",
            "PixtralImageProcessor": "Lines",
        },
        defaults=BEFORE_LAST,
        on_neuron=True,
    ),
    "llava_next": VisionFamily(ANY_RESOLUTION, defaults=BEFORE_LAST, on_neuron=True),
    "llava_onevision": VisionFamily(ANY_RESOLUTION, defaults={"vision_feature_layer": -1}, on_neuron=True),
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "mistral3": VisionFamily({"PixtralImageProcessor": "Lines"}, defaults=MISTRAL, on_neuron=True),
    "internvl": VisionFamily(
        {"GotOcr2ImageProcessor": "Grid"},
        defaults={"vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        vision_defaults=_vision_defaults(1024, 4096, 24, 16, 448, 14, "gelu", 1e-6),
        on_neuron=True,
    ),
    "lighton_ocr": VisionFamily({"PixtralImageProcessor": "Blocks"}, defaults=MISTRAL),
    "gemma3": VisionFamily({"Gemma3ImageProcessor": "Pooled"}, whole_images=True),
    "qwen2_vl": VisionFamily(PIXEL_BOUNDS, tower="QwenTower", vision_defaults={"hidden_act": "quick_gelu"}),
    "qwen2_5_vl": VisionFamily(
        PIXEL_BOUNDS,
        tower="QwenTower",
        vision_defaults={"hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
    ),
    "qwen3_vl": VisionFamily(
        PIXEL_BOUNDS,
        tower="QwenTower",
        vision_defaults={"hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": (8, 16, 24)},
    ),
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35,
    "glm_ocr": VisionFamily(
        {"Glm46VImageProcessor": "FrameBounds"},
        tower="GlmTower",
        vision_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    ),
    "paddleocr_vl": VisionFamily(
        {"PaddleOCRVLImageProcessor": "UpscaledBounds"},
        tower="PaddleTower",
        vision_defaults=_vision_defaults(1152, 4304, 27, 16, 384, 14, "gelu_pytorch_tanh", 1e-6)
        | {"spatial_merge_size": 2},
    ),
}

# Parameters of transformers' generation that this server does not support, by their values without effect.
UNSUPPORTED_GENERATION: list[tuple[tuple[Any, ...], str]] = [
    ((0,), "diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_length"),
    ((0,), "min_new_tokens no_repeat_ngram_size penalty_alpha"),
    ((1,), "encoder_repetition_penalty guidance_scale length_penalty num_beams"),
    (([], {}), "bad_words_ids begin_suppress_tokens forced_decoder_ids sequence_bias suppress_tokens"),
    ((), "dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id"),
    ((), "max_new_tokens top_h watermarking_config"),
]


@dataclass(frozen=True)
class Manifest:
    """What the `config.json` and `generation_config.json` of a checkpoint say."""

    model_type: str
    max_positions: int | None  # context length of the training, in tokens
    eos_token_ids: tuple[int, ...]
    is_compiled: bool = False  # for Neuron
    config_json: Json = field(default_factory=dict, compare=False, repr=False)  # all of it
    generation_config: Json = field(default_factory=dict, compare=False, repr=False)
    # The fields of preprocessor_config.json and processor_config.json, in one.
    processor_config: Json = field(default_factory=dict, compare=False, repr=False)

    @property
    def image_processor(self) -> str:
        """The class of the image processor, without the endings "Fast" and "Pil", which name the library that
        it uses. "": the folder names no image processor."""
        given = str(self.processor_config.get("image_processor_type") or "")
        return given.removesuffix("Fast").removesuffix("Pil")

    @property
    def image_token_id(self) -> int | None:
        """The id of the token that stands in a prompt for each embedding of an image; None: config.json names
        none."""
        config = self.config_json
        return whole(config.get("image_token_id", config.get("image_token_index")))

    @property
    def vision_family(self) -> VisionFamily:
        return vision_family(self.config_json)

    @property
    def layout(self) -> str | None:
        """How images are preprocessed: a class in text/images/layouts.py. None: only text is read."""
        return self.vision_family.layouts.get(self.image_processor)

    @property
    def reads_images(self) -> bool:
        return self.layout is not None

    @property
    def why_no_images(self) -> str:
        """Why only the text of a family that reads images is served, for the log. "": its images are read, or
        the family is not in VISION_FAMILIES."""
        if self.model_type not in VISION_FAMILIES or self.reads_images:
            return ""
        if self.image_processor:
            return f"its image_processor_type {self.image_processor} is not supported"
        files = "preprocessor_config.json or processor_config.json"
        return f"its folder has no {files} that says how images are preprocessed (image_processor_type)"

    @property
    def stop_strings(self) -> list[str]:
        """The texts that end a completion, by generation_config.json."""
        given = self.generation_config.get("stop_strings")
        texts = given if isinstance(given, list) else [given]
        return [text for text in texts if text and isinstance(text, str)]

    @property
    def unused(self) -> list[str]:
        """The names in UNSUPPORTED_GENERATION that generation_config.json gives a value with an effect,
        sorted."""
        given = self.generation_config
        return sorted(
            name
            for neutral, names in UNSUPPORTED_GENERATION
            for name in names.split()
            if given.get(name) not in (None, *neutral)
        )

    @property
    def text_config(self) -> Json:
        """The text part of a vision-language model's config.json; the whole config.json of another model."""
        return text_part(self.config_json)

    @property
    def vision_config(self) -> Json:
        return vision_part(self.config_json)

    @property
    def length_limit(self) -> int | None:
        """The number of tokens beyond which positions or attention depend on the longest sequence; None: they
        never do, or the number is unknown.

        The limit is the size of an attention chunk or, without one, the smallest original length of the ropes
        whose kind is in LENGTH_DEPENDENT_ROPE.
        """
        facts = self.text_config
        if chunk := facts.get("attention_chunk_size"):
            return chunk
        limits = [
            rope[ORIGINAL_LENGTH] or self.max_positions
            for rope in read_ropes(facts)
            if rope["rope_type"] in LENGTH_DEPENDENT_ROPE
        ]
        return min(filter(None, limits), default=None)

    @property
    def gguf_file(self) -> Path | None:
        """The GGUF file that the folder was made of, and that has its weights; None: the folder has them."""
        file = self.config_json.get(GGUF_FILE)
        return Path(file) if file else None

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of the keys and values of a token in all layers with a KV cache, in float32; None if
        config.json does not say."""
        facts = self.text_config
        try:
            heads = facts["num_attention_heads"]
            size = facts.get("head_dim") or facts["hidden_size"] // heads
            return 2 * 4 * size * (facts.get("num_key_value_heads") or heads) * attention_layers(facts)
        except (KeyError, TypeError, ZeroDivisionError):
            return None

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Reads what a model folder says: config.json, generation_config.json, and the files of the
        processor. The files but config.json may be missing. Does not look for weights. folder: "~" is
        expanded.

        EOS tokens are those of config.json and generation_config.json; those of `text_config` count if both
        name none. Ids that are no whole numbers are left out. Raises ConfigError for a folder or config.json
        that is missing, a file that `read_json` rejects, no `model_type`, a `text_config` that is no object,
        and a `dtype` or `torch_dtype` of the config that begins with `torch.` or `auto`.
        """
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            kind = "file" if folder.suffix == ".gguf" else "folder"
            raise ConfigError(f"--model-id {folder}: there is no such {kind}")
        path = folder / "config.json"
        if not path.exists() and (inside := sorted(folder.glob("*/config.json"))):
            raise ConfigError(
                f"{folder} has its models in subfolders: give one, --model-id {inside[-1].parent}"
            )
        config = read_json(path, required="model folder")
        if not isinstance(config.get("model_type"), str):
            raise ConfigError(f"{path} has no `model_type`, so the model cannot be loaded")
        text_config = config.get("text_config")  # of vision-language models
        if text_config is None:
            text_config = config
        if not isinstance(text_config, dict):
            raise ConfigError(
                f"{path}: text_config should be a JSON object, not {type(text_config).__name__}"
            )
        for facts, name in itertools.product((config, text_config), ("dtype", "torch_dtype")):
            if str(facts.get(name)).startswith(("torch.", "auto")):
                raise ConfigError(
                    f"{path}: {name} is {facts[name]!r}; write a type's name, such as 'bfloat16'"
                )
        lengths = [text_part(config).get(name) for name in CONTEXT_LENGTHS]
        generation_config = read_json(folder / "generation_config.json")
        eos_ids = _token_ids([facts.get("eos_token_id") for facts in (config, generation_config)])
        return cls(
            model_type=config["model_type"],
            max_positions=next((n for n in map(whole, lengths) if n and n > 0), None),
            eos_token_ids=tuple(dict.fromkeys(eos_ids or _token_ids(text_config.get("eos_token_id")))),
            is_compiled="neuron" in config,
            config_json=config,
            generation_config=generation_config,
            processor_config=_processor_config(folder),
        )


def text_part(config: Json) -> Json:
    """Returns the text part of a config.json, as a new object with TEXT_DEFAULTS for missing keys; `config`
    itself if it has no text part. A key that is null stays null."""
    text = config.get("text_config")
    if not text or not isinstance(text, dict):
        return config
    return {**TEXT_DEFAULTS.get(text.get("model_type"), {}), **text}


def attention_layers(facts: Json) -> int:
    """Returns how many layers of a text config have a KV cache. Other layers have a recurrent state, or
    neither.

    The first of these that the config has counts: the kind of each layer, the indices of the attention
    layers, every how many layers one comes, the number of layers. Raises KeyError if the config does not say.
    """
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if kinds := facts.get(name):
            others = ("linear_attention", "mamba", "conv", "moe", "mlp", *"ME-")
            return sum(kind not in others for kind in kinds)
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if name in facts:
            return len(facts[name])
    layers = facts["num_hidden_layers"]
    if period := facts.get("attn_layer_period"):
        return len(range(facts["attn_layer_offset"], layers, period))
    return layers // facts.get("full_attention_interval", 1)


def vision_family(config: Json) -> VisionFamily:
    return VISION_FAMILIES.get(config.get("model_type"), TEXT_ONLY)


def vision_part(config: Json) -> Json:
    """Returns the vision part of a vision-language model's config.json; {}: there is none.

    Of a value in several places, the last of these counts: the defaults of the family, the defaults of the
    tower, the config itself. A null does not count. Of an `image_size` or `patch_size` with two sides, which
    are equal, the first one is returned.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return {}
    given = {name: value for name, value in vision.items() if value is not None}
    for name in ("image_size", "patch_size"):
        match given.get(name):
            case [side, *_]:  # height and width, which are equal
                given[name] = side
    return {
        **vision_family(config).vision_defaults,
        **VISION_DEFAULTS.get(str(vision.get("model_type")), {}),
        **given,
    }


def read_ropes(facts: Json) -> list[Json]:
    """Returns the rotary positions of a text config: one object for all layers, or one for each type of
    layers.

    Each object has the names of transformers 5, such as `rope_type`. Each also has `rope_theta` and
    `original_max_position_embeddings`: the object's own or, if it lacks them, those of the config beside it.
    The original length is the context length if neither names it. Both are None where nothing is known. A
    `longrope` whose original length is not the context length gets the quotient of the two as its `factor`.
    """
    given = facts.get("rope_parameters") or facts.get("rope_scaling")
    if not isinstance(given, dict):
        given = {}
    longest = facts.get("max_position_embeddings")
    shared = {"rope_theta": facts.get("rope_theta"), ORIGINAL_LENGTH: facts.get(ORIGINAL_LENGTH) or longest}
    ropes = [shared | each for each in given.values() if isinstance(each, dict)] or [shared | given]
    for rope in ropes:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        rope["rope_type"] = "longrope" if kind == "su" else kind  # in Phi-3's first files
        rope[ORIGINAL_LENGTH] = rope[ORIGINAL_LENGTH] or shared[ORIGINAL_LENGTH]
        if rope["rope_type"] == "longrope" and longest and longest != rope[ORIGINAL_LENGTH]:
            rope["factor"] = longest / rope[ORIGINAL_LENGTH]
    return ropes


def _processor_config(folder: Path) -> Json:
    """Returns the fields of the processor's files as one object; {} without the files. A field that is null
    does not count.

    Of a field in several places, the last of these counts: preprocessor_config.json, `image_processor` of
    processor_config.json, the rest of processor_config.json. transformers 5 writes processor_config.json
    only; earlier versions wrote both files. Raises ConfigError for a file that `read_json` rejects.
    """
    processor = read_json(folder / "processor_config.json")
    image_processor = processor.pop("image_processor", None)
    if not isinstance(image_processor, dict):
        image_processor = {}
    files = (read_json(folder / "preprocessor_config.json"), image_processor, processor)
    return {name: value for fields in files for name, value in fields.items() if value is not None}


def _token_ids(given: Any) -> list[int]:
    """Returns the ids in a number, or in a list, which may hold lists. Anything else, such as null, holds
    none."""
    if isinstance(given, list):
        return [token for each in given for token in _token_ids(each)]
    number = whole(given)
    return [] if number is None else [number]


def whole(value: Any) -> int | None:
    """A whole number of a JSON file, which may write 20 as 20.0; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def read_json(path: Path, required: str = "") -> Json:
    """Returns the JSON object in a file of a model folder or of an adapter; {} without the file.

    Raises ConfigError for a device, FIFO or socket, a git-lfs pointer, a file of more than MAX_JSON
    characters, one that cannot be read, and one that is no JSON object. required: what a folder without the
    file is not, such as "model folder": a missing file is an error, too.
    """
    check_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            raise ConfigError(f"{path} has more than {MAX_JSON} characters, and is not read")
        reject_lfs_pointer(path)
        data = json.loads(text)
    except FileNotFoundError:
        if required:
            missing = f"it has no {path.name}{_instead_of_config(path.parent)}"
            raise ConfigError(f"{path.parent} is not a {required}: {missing}") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no JSON
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as JSON: {reason}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold a JSON object, not {type(data).__name__}")
    return data


def check_regular(path: Path) -> None:
    """Raises ConfigError for a device, a FIFO or a socket: reading it might never end.

    The path is checked. If it is a folder, so are the files in it and those one folder deeper. Names that
    begin with a dot, links to nothing, and folders that this user may not read are left out.
    """
    for each in (path, *path.glob("[!.]*"), *path.glob("[!.]*/[!.]*")):
        with contextlib.suppress(OSError):  # a link to nothing, a folder of others
            if kind := ENDLESS.get(stat.filemode(each.stat().st_mode)[0]):
                raise ConfigError(f"{each} is {kind}, and only regular files are read")


def _instead_of_config(folder: Path) -> str:
    """Returns what a folder holds instead of a config.json, as the end of a sentence; "": nothing that is
    known. Raises ConfigError for an adapter_config.json that `read_json` rejects."""
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        return f"; it is a LoRA adapter: give --model-id {base}, and the adapter with --lora-adapters"
    if (folder / "params.json").exists():
        return " but params.json, Mistral's own format; give the same model in transformers' format"
    return ""


def has_gguf(path: Path) -> bool:
    """Whether a path is a file, or a folder with a *.gguf file and no config.json."""
    return path.is_file() or (not (path / "config.json").exists() and any(path.glob("*.gguf")))


def reject_lfs_pointer(path: Path) -> None:
    """Raises ConfigError if the file is a git-lfs pointer, a text in the place of a file, or cannot be
    read."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
    except OSError as error:  # a link to a missing file
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if begin == LFS_POINTER:
        raise ConfigError(f"{path} is a git-lfs pointer, not the file: run `git lfs pull` in its repository")


def check_weight_files(folder: Path) -> None:
    """Raises ConfigError if `folder` has no weights under the names that transformers reads, or only some of
    them.

    Weights are model.safetensors, or all files that the index names or, without an index, that the numbers in
    their names ask for: model-1-of-3.safetensors needs the files 2 and 3. If there are none, the error names
    another file with weights, and the remedy. Any *.safetensors that is a git-lfs pointer or cannot be read,
    and an index that `read_json` rejects, raise ConfigError, too. The files' contents are not checked.
    """
    found = sorted(folder.glob(*SAFETENSORS))
    for path in found:
        reject_lfs_pointer(path)
    if (folder / "model.safetensors").exists():
        return
    index = read_json(folder / "model.safetensors.index.json").get("weight_map") or {}
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(
            f"{folder / 'model.safetensors.index.json'}: `weight_map` must name a file for each tensor"
        )
    names = set(index.values())
    for path in folder.glob(SHARDS):
        if not names and (shard := re.fullmatch(r"model-(\d+)-of-(\d+)", path.stem)):
            numbers = range(1, int(shard[2]) + 1)
            names = {f"model-{n:0{len(shard[1])}}-of-{shard[2]}.safetensors" for n in numbers}
    if names:
        missing = sorted(name for name in names if not (folder / name).exists())
        if missing:
            raise ConfigError(f"{folder} lacks {len(missing)} of its weight files, {missing[0]} among them")
        return
    others = [*found, *folder.glob("*.bin"), *sorted(folder.glob("*.gguf"))]
    if not others:
        raise ConfigError(f"{folder} holds no weights (model.safetensors)")
    other = others[0].name
    remedy = "rename it"
    if other.endswith(".gguf"):
        remedy = f"name the file, --model-id {folder / other}"
    elif other.startswith("consolidated"):
        remedy = "it has Mistral's own format; download the files of transformers' format, too"
    elif other.endswith(".bin"):
        remedy = "it is pickled, which is not read; save the model with transformers' save_pretrained"
    raise ConfigError(f"{folder} holds no model.safetensors, but {other}: {remedy}")


def check_weights(parameters: int, folder: Path) -> None:
    """Raises ConfigError for a model of more parameters than the weight files in `folder` have bytes, such as
    when a file is missing: loading would allocate memory for all of them before it fails. COMPUTED parameters
    need no bytes. A weight file that is a link to nothing raises ConfigError, too."""
    files = {path for pattern in WEIGHTS for path in folder.glob(pattern)}
    try:
        stored = sum(path.stat().st_size for path in files)
    except OSError as error:  # a link to a missing file
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    if parameters > stored + COMPUTED:  # a parameter takes at least a byte
        raise ConfigError(
            f"{folder}: config.json describes {parameters / 1e9:,.1f} billion parameters, more than its "
            f"weight files of {stored / 1e9:,.3f} GB can hold"
        )
