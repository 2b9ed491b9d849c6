"""Settings: flags, environment variables and the model's own files become one frozen `Config`, which every
process reads.

In this order: how a value is read and checked, the settings (one `setting(...)` is the flag, its variables,
the default, the line of `--help` and the row in docs/settings.md), the compatibility aliases, the parser.

    python3 config.py [flags]   checks everything and prints the resolved configuration as JSON
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import ipaddress
import json
import logging
import math
import os
import re
import shlex
import socket
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

import logs
from manifest import Manifest, has_gguf
from run import HERE, ConfigError, Json, check_process_limits, explained, run_dir

VERSION = "0.2.0"  # the same as in pyproject.toml (tested)
DEMO_MODEL = HERE / "demo" / "model"
TRIAL_MODEL = "smollm2"  # this server's alias of TRIAL_REPOSITORY
TRIAL_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHECKPOINT_QUANTIZE = "checkpoint"  # --quantize names a method, which is right where the checkpoint has one
SAGEMAKER_MODEL = Path("/opt/ml/model")  # where SageMaker unpacks an endpoint's model
# The default context length: at least this many tokens, if the model has them, and more where the KV cache of
# all slots takes at most this share of the memory.
DEFAULT_MAX_TOTAL_TOKENS = 2048
MEMORY_SHARE = 1 / 4
TGI_NAME = "tgi"  # TGI's own name for the model, whatever it is
FP8 = "fp8_e4m3fn"  # of a KV cache
KV_SHARE_OF_FLOAT32 = {"bfloat16": 0.5, "u8": 0.3}  # bytes of a KV cache; u8 with its scales
DEFAULT_BATCH_SIZE = 4
MAX_DEFAULT_PREFIX_SLOTS = 64  # a prompt is compared with what each of them holds
DEVICE_TOP_K = 256  # largest top-k of on-device sampling
DEVICES = ("cpu", "cuda", "neuron")  # of ENGINES in models/__init__.py (tested)
# The names in REASONING_FORMATS of text/output/reasoning_formats.py (tested), and vLLM's parsers that mean
# the first of them.
REASONING_PARSERS = ("think", "deepseek_r1", "mistral", "seed_oss", "gemma4", "openai_gptoss")
REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),  # vLLM's name, SGLang's
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
THINK_PARSERS = (
    "deepseek_v3",
    "ernie45",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "olmo3",
    "qwen3",
    "step3",
)
MAX_COUNT = 10**9  # of a setting that is a whole number
MAX_NUMBER = 10**6  # of any other
MAX_TOP_TOKENS = 10_000  # of `max_top_n_tokens`
# The default --payload-limit, in bytes.
TEXT_PAYLOAD = 2_000_000
IMAGE_PAYLOAD = 32_000_000

# Options of transformers-neuronx's NeuronConfig that change the speed and not the output, with their values.
NEURON_CONFIG = {
    "collectives_layout": "BSH",
    "on_device_embedding": "true",
    "sequence_parallel_norm": "true",
    "sequence_parallel_norm_threshold": "[1-9][0-9]*",
    "shard_over_sequence": "true",
    "weight_tiling": "true",
}


class Dtype(NamedTuple):
    """A type of numbers."""

    bytes: int
    short: str  # its name in OpenVINO and transformers-neuronx
    other: str = ""  # one more


DTYPES = {
    "float32": Dtype(4, "f32", "fp32"),
    "bfloat16": Dtype(2, "bf16"),
    "float16": Dtype(2, "f16", "fp16"),
    "u8": Dtype(1, "u8"),  # of a KV cache
}
DTYPE_NAMES = {
    alias: name for name, dtype in DTYPES.items() for alias in (name, dtype.short, dtype.other) if alias
}


# Parsers of values: each takes a text without spaces around it, and returns the value. For any other text it
# raises ValueError, which says what the value must be.


def _whole_number(value: str, low: int = 1, high: int = MAX_COUNT) -> int:
    """Returns a whole number from `low` to `high`. Raises ValueError for any other text."""
    try:
        number = int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if number < low and high == MAX_COUNT:
        raise ValueError(f"must be at least {low}")
    if not low <= number <= high:
        raise ValueError(f"must be between {low} and {high}")
    return number


_from_0 = functools.partial(_whole_number, low=0)
_from_2 = functools.partial(_whole_number, low=2)


def _chunk(value: str) -> int:
    number = _from_0(value)
    if number in (1, 2):  # so that no chunk of a longer prompt has one token
        raise ValueError("must be 0 (off) or at least 3")
    return number


def _lengths(value: str) -> tuple[int, ...]:
    """The lengths in a list with commas, each once, ascending."""
    return tuple(sorted({_whole_number(part) for part in value.split(",")}))


def _parse_neuron_config(value: str) -> tuple[str, ...]:
    """Returns the options of a text, each once as `name=value`, sorted by name. Raises ValueError for an
    option that NEURON_CONFIG lacks, a value that it does not allow, and an option with two values.

    Example: "weight_tiling=true, collectives_layout=BSH" gives ("collectives_layout=BSH",
    "weight_tiling=true").
    """
    given = {}
    for option in value.split(","):
        name, _, written = option.strip().partition("=")
        if name not in NEURON_CONFIG:
            raise ValueError(f"{name!r} is not an option; supported: {', '.join(NEURON_CONFIG)}")
        if not re.fullmatch(NEURON_CONFIG[name], written):
            allowed = f"{NEURON_CONFIG[name]}, or left out"
            if name == "sequence_parallel_norm_threshold":
                allowed = "a positive whole number"
            raise ValueError(f"{name} must be {allowed}")
        if given.setdefault(name, written) != written:
            raise ValueError(f"{name} is given twice")
    return tuple(f"{name}={written}" for name, written in sorted(given.items()))


def _ratio(value: str) -> float:
    """Returns a number from 0 to MAX_NUMBER. Raises ValueError for any other text."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"must be a number between 0 and {MAX_NUMBER}")
    return number


def _positive(value: str) -> float:
    with contextlib.suppress(ValueError):
        if (number := _ratio(value)) > 0:
            return number
    raise ValueError(f"must be a positive number, at most {MAX_NUMBER}")


def _one_of(*words: str, aliases: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A parser that returns one of these words, for a text in any case. aliases: further texts, in lower
    case, and the word that each stands for."""

    def parse(value: str) -> str:
        word = (aliases or {}).get(value.lower(), value.lower())
        if word not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return word

    return parse


def _switch(value: str) -> bool:
    aliases = {"1": "true", "yes": "true", "0": "false", "no": "false"}
    return _one_of("true", "false", aliases=aliases)(value) == "true"


def _log_level(value: str) -> str:
    """Returns error, warn, info or debug for the name of a level, in any case: `warning` is warn, `critical`
    and `off` are error, `trace` is debug. Of a filter of TGI's launcher the first item counts, with or
    without a target: `info,text_generation_router=debug` is info. Raises ValueError for another text."""
    level = re.sub(r"^[^,=]*=|\s*,.*", "", value)
    return _one_of(
        "error",
        "warn",
        "info",
        "debug",
        aliases={"critical": "error", "off": "error", "warning": "warn", "trace": "debug"},
    )(level)


def _quantize(value: str) -> str | None:
    """Returns int8 or int4, None for "none", or CHECKPOINT_QUANTIZE for a name that TGI gives to a method.
    Raises ValueError for any other text."""
    # The method of a quantized checkpoint, or one that TGI applies.
    methods = "awq|bitsandbytes(-nf4|-fp4)?|compressed-tensors|eetq|exl2|fp8|gptq|marlin"
    if re.fullmatch(methods, value.lower()):
        return CHECKPOINT_QUANTIZE
    word = _one_of("none", "int8", "int4")(value)
    return None if word == "none" else word


def _kv_cache_dtype(value: str) -> str:
    """Returns the type of a KV cache, or auto. Raises ValueError for any other text, and for fp8_e5m2 and
    int8 with the type to give instead."""
    if value.lower() == "fp8_e5m2":
        raise ValueError(
            f"not supported; give {FP8}, which has less than a third of the error (KL divergence 0.0086 "
            "instead of 0.0303)"
        )
    if value.lower() == "int8":
        raise ValueError(
            f"not supported; give u8 on CPUs and {FP8} on Neuron, where int8 has no scales (KL divergence "
            "1.4 or more instead of 0.0086)"
        )
    return _one_of("auto", "float32", "bfloat16", "u8", FP8, aliases={"fp8": FP8, "fp8_e4m3": FP8})(value)


def _model_id(value: str) -> str:
    if "://" in value:
        raise ValueError("must be a hub id (owner/name), a folder or a GGUF file, not a URL")
    return value


def _file(value: str) -> str:
    path = _absolute_path(value)
    if not os.path.isfile(path):
        raise ValueError("there is no such file")
    return path


def _absolute_path(value: str) -> str:
    """Returns a path without "~"; that of a user who does not exist stays, as in a shell."""
    return str(Path(os.path.expanduser(value)).absolute())


def _adapter(value: str) -> str:
    """Returns a LoRA adapter as its name, `=`, and its folder, made absolute, or its id on the hub, which is
    not looked up. Raises ValueError for JSON, an empty name, and a folder that does not exist.

    A source is a folder if it begins with a slash, a dot or "~", if it has no slash, or if there is such a
    folder. Without a name, the name is the source without its revision. Examples: "sql=./a" gives
    "sql=/here/a", and "owner/a@v2" gives "owner/a=owner/a@v2".
    """
    if value.lstrip().startswith("{"):
        raise ValueError("must be name=folder, name=owner/adapter or owner/adapter, not JSON")
    name, _, source = (part.strip() for part in value.partition("="))
    if not name:
        raise ValueError(f"must have a name before the =: {value}")
    source = source or name
    is_folder = source.startswith(("/", ".", "~")) or "/" not in source or os.path.isdir(source)
    if is_folder and not os.path.isdir(_absolute_path(source)):
        raise ValueError(f"there is no folder {source}")
    if name == source:
        name = name.partition("@")[0]
    return f"{name}={_absolute_path(source) if is_folder else source}"


def _adapters(value: str) -> tuple[str, ...]:
    """Returns adapters that commas separate, each in the form of `_adapter`. Raises ValueError for a text
    that `_adapter` rejects, and for two adapters of one name."""
    adapters = tuple(_adapter(adapter) for adapter in value.split(",") if adapter.strip())
    names = [adapter.partition("=")[0] for adapter in adapters]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two adapters have the name {name}; give one of them another, as name=folder")
    return adapters


def _one_adapter(value: str) -> str:
    """Returns an adapter in the form of `_adapter`. Raises ValueError for none or several, and for a text
    that `_adapter` rejects."""
    adapters = _adapters(value)
    if len(adapters) != 1:
        raise ValueError(
            f"{len(adapters)} adapters are given, and one can be merged; --lora-adapters serves several"
        )
    return adapters[0]


def _ip(value: str) -> str:
    return str(ipaddress.ip_address("127.0.0.1" if value == "localhost" else value))


def _root_path(value: str) -> str | None:
    """The path without a slash at its end; None for the slash alone."""
    path = value.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("must be a path such as /serve, of letters, digits and the characters . _ ~ -")
    return path or None


def _path(value: str) -> str:
    if not re.fullmatch("/[^<]*", value):  # Flask's rules have variables in angle brackets
        raise ValueError("must begin with a slash, and have no <")
    return value


def _api_key(value: str) -> str:
    if not re.fullmatch(r"[!-~]+", value):
        raise ValueError("must be printable ASCII characters without spaces")
    return value


def _key_file(value: str) -> str:
    """Returns the absolute path of a file of API keys. Raises ValueError if the file cannot be read, or
    `keys_of` rejects it. The keys are not kept: the file is read again while the server runs."""
    path = _absolute_path(value)
    try:
        keys_of(path)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    return path


def keys_of(path: str) -> list[str]:
    """The API keys in a file, one per line, without spaces around them. Empty lines do not count. Raises
    OSError, and ValueError if a key is invalid or the file has none: without a key the server would be open
    to everybody."""
    keys = [_api_key(line.strip()) for line in Path(path).read_text().splitlines() if line.strip()]
    if not keys:
        raise ValueError("has no key in it")
    return keys


def _collector(value: str) -> str:
    """Returns the URL that receives traces by OTLP over HTTP, which ends in /v1/traces. Raises ValueError for
    a text that is no http or https URL, and for the port of OTLP over gRPC."""
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("must be the URL of a collector, such as http://localhost:4318")
    if url.port == 4317:
        raise ValueError(
            "port 4317 is for OTLP over gRPC; traces are sent over HTTP, for which collectors use port 4318"
        )
    return value.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"


def _json_object(value: str) -> str:
    """Returns the text itself, if it is a JSON object. Raises ValueError for any other text."""
    try:
        members = json.loads(value)
    except (ValueError, RecursionError):  # nested too deeply
        members = None
    if not isinstance(members, dict):
        raise ValueError("must be a JSON object")
    return value


def _origins(value: str) -> tuple[str, ...]:
    """Returns the origins of a list with commas, or "*" among them, without spaces and without slashes at
    their ends. There may be none. Raises ValueError for any other item."""
    origins = tuple(origin.strip().rstrip("/") for origin in value.split(",") if origin.strip())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ValueError(f"{origin!r} is not an origin; one looks like https://example.com")
    return origins


# The last label begins with a letter: 127.1 is another spelling of an address.
HOST_NAME = re.compile(r"([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z]([a-z0-9-]*[a-z0-9])?")


def _domains(value: str) -> tuple[str, ...]:
    """The hosts of a list with commas or spaces, each once, in lower case."""
    return tuple(dict.fromkeys(_domain(domain) for domain in value.lower().replace(",", " ").split()))


def _domain(value: str) -> str:
    """Returns a host as URLs write it, with a port or without. value: in lower case. Raises ValueError for a
    text that is no host."""
    host, _colon, port = value.rpartition(":")
    if whole := _host(value):
        return whole
    if _host(host) and port.isdecimal() and 0 < int(port) < 65536:
        return f"{_host(host)}:{int(port)}"
    raise ValueError(f"{value!r} is not a host; one looks like upload.wikimedia.org or 10.0.0.5:9000")


def _host(value: str) -> str:
    """Returns a name, or an address, IPv6 in brackets; "" for a text that is neither."""
    try:
        address = ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        return value if HOST_NAME.fullmatch(value) else ""
    return f"[{address}]" if address.version == 6 else str(address)


PARSERS = {"str": str, "int": _whole_number, "float": _positive, "bool": _switch}  # by the type of a field


def setting(
    default: Any, help: str, *, names: str = "", parse: Callable[[str], Any] | None = None, shown: str = ""
) -> Any:
    """Returns a field of `Config`. Its flag is the field's name with dashes, its environment variable the
    name in capitals.

    names: further names, separated by spaces. Those with a dash are flags beside the first one. The others
    are all environment variables of the setting; they replace the name in capitals. If several have a value,
    the first one counts, and any flag comes before any variable. parse: reads a text, or raises ValueError;
    None: the parser of the field's type. shown: the default in the help, if it is not `default`.
    """
    variables = [name for name in names.split() if not name.startswith("-")]
    flags = [name for name in names.split() if name.startswith("-")]
    if not shown:
        shown = f"{default:g}" if isinstance(default, float) else str(default).lower()
    return field(
        default=default,
        metadata={"names": variables, "flags": flags, "help": help, "parse": parse, "shown": shown},
    )


@dataclass(frozen=True)
class Config:
    """All settings. None: the model (`with_manifest`) or the device decides."""

    model_id: str = setting(
        str(DEMO_MODEL),
        "Model to serve: a hub id, a local folder, a GGUF file (a path, or owner/name:file.gguf on the hub), "
        f"or {TRIAL_MODEL}, a real model that is small enough for any CPU.",
        names="MODEL_ID HF_MODEL_ID",
        parse=_model_id,
        shown="the model in /opt/ml/model (SageMaker), else the built-in demonstration model",
    )
    served_model_name: str | None = setting(
        None,
        "The model's name in responses and in /v1/models. Without lora_adapters and "
        "lora_folder requests may use any name.",
        shown="model_id",
    )
    lora_adapters: tuple[str, ...] = setting(
        (),
        "LoRA adapters that requests can choose by name, separated by commas: hub ids, also id@revision, "
        "folders, or name=folder. Other requests get the model without an adapter. For CPUs and GPUs.",
        parse=_adapters,
        shown="none",
    )
    merge_lora: str | None = setting(
        None,
        "LoRA adapter to merge into the model's weights, once, for all requests: as one of lora_adapters.",
        parse=_one_adapter,
    )
    lora_folder: str | None = setting(
        None,
        "Folder that LoRA adapters may be loaded from at run time, by paths below it; from the hub, too. "
        "Needs an API key.",
        parse=_absolute_path,
        shown="none is loaded at run time",
    )
    max_lora_rank: int = setting(16, "Largest rank of a LoRA adapter that is loaded at run time.")
    max_cpu_loras: int = setting(
        32, "LoRA adapters, those of lora_adapters among them, beyond which none is loaded."
    )
    max_lora_memory: float = setting(
        1.0,
        "GB of memory for all LoRA adapters, beyond which none is loaded, and of the file of one.",
    )
    max_snapshot_memory: float = setting(
        1.0,
        "GB of memory for snapshots of recurrent states, from which prompts that begin alike go on. Only "
        "models with linear attention, short convolutions or state spaces have such states.",
        parse=_ratio,
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a hub model.",
        names="REVISION HF_MODEL_REVISION",
    )
    huggingface_hub_cache: str | None = setting(
        None,
        "Folder for downloaded models.",
        names="HUGGINGFACE_HUB_CACHE HF_HUB_CACHE",
        parse=_absolute_path,
        shown="that of huggingface_hub",
    )
    trust_remote_code: bool = setting(
        False,
        "Run the Python code that comes with the model. Only for models that you trust.",
        names="TRUST_REMOTE_CODE HF_MODEL_TRUST_REMOTE_CODE",
    )
    tokenizer_config_path: str | None = setting(
        None,
        "File to read the chat template and the special tokens from.",
        parse=_file,
        shown="the model's tokenizer_config.json",
    )
    generation_config: str = setting(
        "auto",
        "Defaults of requests on /v1 routes. auto: the sampling parameters and stop strings of the model's "
        "generation_config.json; none: OpenAI's.",
        parse=_one_of("auto", "none", aliases={"vllm": "none"}),
    )
    chat_template_kwargs: str | None = setting(
        None,
        'Variables for the chat template, as a JSON object, such as {"enable_thinking": false}. Those of a '
        "request take precedence.",
        parse=_json_object,
    )
    mm_processor_kwargs: str | None = setting(
        None,
        "Fields of the model's preprocessor_config.json to override, as a JSON object, such as "
        '{"size": {"longest_edge": 1024}} for fewer tokens of an image. Another field than those that the '
        "model supports is refused with their names.",
        parse=_json_object,
    )
    escape_special_tokens: bool = setting(
        False,
        "Encode special tokens in what clients write (messages, tools, prompts) as plain text. Only the "
        "chat template writes control tokens.",
    )
    tool_parser: str | None = setting(
        None,
        "Format in which the model writes tool calls, by its name in docs/api/tools.md or vLLM's; none "
        "leaves calls in the text.",
        names="TOOL_PARSER --tool-call-parser",
        shown="the one in which the chat template writes calls",
        parse=str.lower,
    )
    reasoning_parser: str | None = setting(
        None,
        f"Format in which the model writes its reasoning: {', '.join(REASONING_PARSERS)}; none leaves it in "
        "the content of chats. think is `<think>...</think>`, also under vLLM's names, such as qwen3; with "
        "deepseek_r1 an output begins within it.",
        shown="detected in the chat template",
        parse=_one_of(*REASONING_PARSERS, "none", aliases=dict.fromkeys(THINK_PARSERS, "think")),
    )
    reasoning_fields: str = setting(
        "both",
        "Names of the reasoning in chats: reasoning, reasoning_content, or both. OpenAI's Agents SDK sends "
        "it back only if it is reasoning alone.",
        parse=_one_of(*REASONING_FIELDS),
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda or neuron; auto uses what the machine has.",
        parse=_one_of("auto", *DEVICES),
    )
    dtype: str = setting(
        "auto",
        "auto, float32, bfloat16 or float16. auto is the checkpoint's; on a CPU it is bfloat16 if the "
        "checkpoint has it, else float32.",
        names="DTYPE HF_AUTO_CAST_TYPE",
        parse=_one_of("auto", "float32", "bfloat16", "float16", aliases=DTYPE_NAMES),
    )
    quantize: str | None = setting(
        None,
        "Weight compression: none, int8, or int4 (CPUs only). On a CPU the first startup needs the "
        "package nncf.",
        names="QUANTIZE HF_MODEL_QUANTIZE",
        parse=_quantize,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of the KV cache. On CPUs: auto, which is bfloat16 where the model is and the CPU multiplies "
        "it, else float32; float32, where the model is computed in it; or u8: eight bits, with a scale for "
        "every 32 tokens, which takes less than a third of float32's memory and turns speculative decoding "
        f"off unless --speculate is given. On Neuron: auto, the model's, or {FP8} (also fp8, fp8_e4m3), "
        "which takes half the memory of bfloat16.",
        parse=_kv_cache_dtype,
    )
    model_cache: str = setting(
        os.path.expanduser("~/.cache/neuron-textgen"),
        "Folder for models converted for CPUs and for compiled sampling loops. Other users must not be able "
        "to write to it.",
        parse=_absolute_path,
        shown="~/.cache/neuron-textgen",
    )
    model_cache_size: float = setting(
        20.0,
        "Gigabytes of converted models to keep; the least recently used are removed first.",
    )
    threads: int | None = setting(
        None,
        "CPU threads for the model.",
        shown="the processors that the process may use",
    )
    tp_degree: int | None = setting(
        None,
        "Tensor parallel degree: NeuronCores to split the model over.",
        names="TP_DEGREE HF_NUM_CORES",
        shown="the one with the least memory per core, among the cores present or in NEURON_RT_VISIBLE_CORES",
    )
    max_batch_size: int | None = setting(
        None,
        "Slots: how many requests are decoded together. Further requests wait in the queue.",
        names="MAX_BATCH_SIZE HF_BATCH_SIZE",
        shown=f"{DEFAULT_BATCH_SIZE}; on Neuron what fits, up to 32",
    )
    max_input_tokens: int | None = setting(
        None,
        "Longest prompt, in tokens.",
        names="MAX_INPUT_TOKENS MAX_INPUT_LENGTH --max-input-length",
        shown="max_total_tokens - 1",
    )
    max_total_tokens: int | None = setting(
        None,
        "Longest prompt plus completion, in tokens: the context length of a slot.",
        names="MAX_TOTAL_TOKENS HF_SEQUENCE_LENGTH",
        parse=_from_2,
        shown="the model's context length, or the largest power of two for which the KV cache of all "
        f"slots fits into a quarter of the memory, at least {DEFAULT_MAX_TOTAL_TOKENS}; on Neuron what "
        "fits, up to 4096",
    )
    max_batch_total_tokens: int | None = setting(
        None,
        "Maximum tokens of all slots together; caps the slots at this value divided by max_total_tokens.",
        parse=_from_2,
        shown="no limit",
    )
    prefill_buckets: tuple[int, ...] | None = setting(
        None,
        "Prompt lengths to compile for Neuron, separated by commas; max_total_tokens is always included.",
        parse=_lengths,
        shown="powers of two from 128, with halfway steps from 2048",
    )
    position_buckets: tuple[int, ...] | None = setting(
        None,
        "Lengths of prompt plus completion to compile for Neuron; max_total_tokens is always included.",
        parse=_lengths,
        shown="powers of two from 128, with halfway steps from 2048",
    )
    neuron_config: tuple[str, ...] | None = setting(
        None,
        "transformers-neuronx options to compile with, as NAME=VALUE, separated by commas: "
        f"{', '.join(NEURON_CONFIG)}. They do not change the output. The flag may be repeated.",
        parse=_parse_neuron_config,
    )
    prefill_chunk: int | None = setting(
        None,
        "Chunked prefill on Neuron: prompt tokens between two decode steps of running requests (0 = off). "
        "Fixed at compile time.",
        parse=_chunk,
        shown="128",
    )
    compile_workers: int | None = setting(
        None,
        "Neuron graphs to compile in parallel; each needs gigabytes of memory.",
        shown="one per processor and 8 GiB of memory",
    )
    compile_cache_size: float = setting(
        20.0,
        "Gigabytes of compiled graphs (NEFFs) that the server keeps in NEURON_COMPILE_CACHE_URL; the least "
        "recently used are removed first. The compiler's own files there do not count.",
    )
    sampling: str | None = setting(
        None,
        "Host or on-device sampling: host; on Neuron also device, which rejects request parameters that only "
        "host supports, or hybrid, which uses the device in each step whose requests all allow it.",
        parse=_one_of("host", "device", "hybrid"),
        shown="hybrid on Neuron, else host",
    )
    max_concurrent_requests: int = setting(
        128,
        "Maximum running and waiting requests; more are rejected with 429.",
    )
    max_queue_time: float | None = setting(
        None,
        "Seconds that a request may wait for a slot before it is rejected with 429.",
        shown="no limit",
    )
    queue_threshold_ms: int | None = setting(
        None,
        "Milliseconds in the queue after which a request goes first; until then shorter prompts start "
        "before longer ones.",
        parse=_from_0,
        shown="requests start in the order of arrival",
    )
    max_batch_prefill_tokens: int | None = setting(
        None,
        "Prompt tokens per decode step of the running requests. OpenVINO runs them in the same step; "
        "elsewhere they run before it, at least one prompt or chunk at a time.",
        shown="with OpenVINO as many as take 150 ms, or a decode step if that is longer; 128 elsewhere",
    )
    waiting_served_ratio: float = setting(
        0.0,
        "Ratio of waiting to running requests from which prompts may interrupt decoding. No effect with "
        "OpenVINO, which runs both in the same step.",
        parse=_ratio,
    )
    max_waiting_tokens: int = setting(
        20,
        "Decode steps after which a waiting prompt runs regardless of waiting_served_ratio.",
        parse=_from_0,
    )
    prefix_reuse: bool = setting(
        True,
        "Prefix caching across requests (a chat's next turn, a common system prompt). The time to first "
        "token may show that others used the same prefix.",
        names="PREFIX_REUSE PREFIX_CACHING USE_PREFIX_CACHING",
    )
    prefix_slots: int | None = setting(
        None,
        "Slots of the KV cache that hold prompts for prefix caching, on CPUs; at most --max-batch-size of "
        "them run at a time. More of them keep more conversations.",
        shown=f"as many as fit into a quarter of the memory, up to {MAX_DEFAULT_PREFIX_SLOTS}; at least "
        "max_batch_size",
    )
    speculate: int | None = setting(
        None,
        "Maximum draft tokens per request and step for n-gram speculative decoding (0 = off). The output "
        "stays the same on CPUs; on Neuron and GPUs rounding may change a choice between nearly equally "
        "likely tokens.",
        parse=_from_0,
        shown="with OpenVINO up to 15, else 0",
    )
    max_client_batch_size: int = setting(
        32,
        "Maximum prompts per request (`/v1/completions`, `/vertex`), and maximum `n` of each.",
    )
    max_best_of: int = setting(2, "Maximum `best_of`.")
    max_stop_sequences: int = setting(
        32,
        "Maximum stop sequences of a request; each has at most 1,000 characters.",
    )
    max_top_n_tokens: int = setting(
        5,
        "Maximum `top_n_tokens`, and `logprobs` in `/v1/completions`.",
        parse=functools.partial(_whole_number, high=MAX_TOP_TOKENS),
    )
    hostname: str = setting(
        "0.0.0.0",
        "IP address to listen on; `::` listens on IPv4, too. A HOSTNAME variable that is not an IP address, "
        "as containers and shells set it, is ignored.",
        parse=_ip,
    )
    port: int = setting(
        8080,
        "Port to listen on. SAGEMAKER_BIND_TO_PORT and Vertex AI's AIP_HTTP_PORT override PORT.",
        names="SAGEMAKER_BIND_TO_PORT AIP_HTTP_PORT PORT -p",
        parse=functools.partial(_whole_number, high=65535),
    )
    api_key: str | None = setting(
        None,
        "Key that requests must send as `Authorization: Bearer` or `x-api-key`, except those for health and "
        "metrics and the pages / and /docs.",
        parse=_api_key,
    )
    api_key_file: str | None = setting(
        None,
        "File of API keys, one per line, which are accepted in addition to --api-key. The server rereads it "
        "when it changes, so keys can be replaced without a restart.",
        parse=_key_file,
    )
    root_path: str | None = setting(
        None,
        "Path prefix of all routes, such as /serve, for a proxy that does not strip it. Requests without it "
        "are served, too.",
        parse=_root_path,
    )
    health_route: str = setting(
        "/health",
        "Another path of `GET /health`, as Vertex AI asks for it.",
        names="AIP_HEALTH_ROUTE",
        parse=_path,
    )
    predict_route: str = setting(
        "/vertex",
        "Another path of `POST /vertex`, as Vertex AI asks for it.",
        names="AIP_PREDICT_ROUTE",
        parse=_path,
    )
    cors_allow_origin: tuple[str, ...] = setting(
        ("*",),
        "Origins of web pages that may call the server, separated by commas; the flag may be repeated.",
        parse=_origins,
        shown="*",
    )
    no_web_page: bool = setting(False, "Do not serve the web UI at `/`.")
    web_concurrency: int = setting(2, "API server processes (HTTP, tokenizing, streaming).")
    payload_limit: int | None = setting(
        None,
        "Largest request body, in bytes; a larger one is rejected with 413.",
        shown=f"{TEXT_PAYLOAD}; {IMAGE_PAYLOAD} for models that read images",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "Hosts that the server may fetch images from, for image URLs in requests, separated by commas or "
        "spaces; the flag may be repeated. Names match exactly and must lead to public addresses; name a "
        "private address, too. A port that is not the scheme's is part of a host, as in 10.0.0.5:9000.",
        parse=_domains,
        shown="no image is fetched",
    )
    response_store_size: int = setting(
        64,
        "MiB of responses of /v1/responses to store, for `previous_response_id` and `item_reference`; the "
        "oldest are removed first. 0 stores none.",
        parse=_from_0,
    )
    client_timeout: float = setting(
        75.0,
        "Timeout in seconds for each of: an idle connection, sending the headers, sending the body, reading "
        "the next part of a response.",
    )
    response_deadline: float | None = setting(
        None,
        "Seconds after which a response that is not streamed ends with the text so far and finish reason "
        "`length`.",
        shown="55 on `/invocations` (SageMaker waits 60), else none",
    )
    startup_timeout: float = setting(
        3600.0,
        "Seconds that the model may take to become ready.",
    )
    stuck_timeout: float = setting(
        120.0,
        "Seconds that a step may be stuck (far longer than usual) before the server exits with code 1.",
    )
    graceful_termination_timeout: float = setting(
        25.0,
        "Seconds for running requests to finish after a signal to stop.",
        names="GRACEFUL_TERMINATION_TIMEOUT -g",
    )
    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector for OTLP over HTTP, such as http://localhost:4318, that receives "
        "traces of requests. Needs the packages of the extra `otel`.",
        parse=_collector,
        shown="no traces",
    )
    profile: str | None = setting(
        None,
        "Folder for a JSON file with the phases of the worker's steps.",
        names="PROFILE PROF_PATH",
        parse=_absolute_path,
        shown="/tmp with PROF_STEP, else no file",
    )
    prof_waitstep: int = setting(0, "Steps to run before the file begins.", parse=_from_0)
    prof_warmupstep: int = setting(
        0,
        "More steps to run before the file begins.",
        parse=_from_0,
    )
    prof_step: int | None = setting(
        None,
        "Steps to record; 0: no file.",
        parse=_from_0,
        shown="100 with profile",
    )
    log_level: str = setting(
        "info",
        "Lowest level to log: error, warn, info or debug; also a filter of TGI's launcher, such as "
        "info,text_generation_router=debug, whose first level counts. Libraries log warnings and errors "
        "only.",
        parse=_log_level,
    )
    json_output: bool = setting(False, "Log one JSON object per line.")

    def __post_init__(self):
        """Raises ConfigError for settings that contradict each other: prompts that leave no token of the
        context length, a slot that exceeds `max_batch_total_tokens`, an adapter with a name of the model."""
        total = self.max_total_tokens
        if total and self.max_input_tokens and self.max_input_tokens >= total:
            raise ConfigError(
                f"`max_input_tokens`({self.max_input_tokens}) must be < `max_total_tokens`({total}): lower "
                "--max-input-tokens (MAX_INPUT_TOKENS) or raise --max-total-tokens (MAX_TOTAL_TOKENS)"
            )
        if total and self.max_batch_total_tokens and total > self.max_batch_total_tokens:
            raise ConfigError(
                f"--max-batch-total-tokens {self.max_batch_total_tokens} (MAX_BATCH_TOTAL_TOKENS) is less "
                f"than one slot of {total} tokens: raise it, or lower --max-total-tokens (MAX_TOTAL_TOKENS)"
            )
        if taken := self.adapters.keys() & self.names_of_model:
            raise ConfigError(
                f"--lora-adapters (LORA_ADAPTERS): {min(taken)} is a name that requests have for the model; "
                "give the adapter another one, as name=folder"
            )

    @property
    def template_options(self) -> Json:
        return json.loads(self.chat_template_kwargs or "{}")

    @property
    def mm_processor_options(self) -> Json:
        return json.loads(self.mm_processor_kwargs or "{}")

    @property
    def adapters(self) -> dict[str, str]:
        """The LoRA adapters that requests can choose: a folder or a hub id by the name for clients."""
        return dict(adapter.split("=", 1) for adapter in self.lora_adapters)

    @property
    def merged_adapter(self) -> str | None:
        """The name of the LoRA adapter that every request gets; None: no adapter is merged."""
        return self.merge_lora.partition("=")[0] if self.merge_lora else None

    @property
    def names_of_model(self) -> list[str]:
        """What requests may call the model without an adapter of theirs."""
        return [self.model_name, TGI_NAME]

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_key or self.api_key_file)

    @property
    def is_demo(self) -> bool:
        return Path(self.model_id) == DEMO_MODEL

    @property
    def model_name(self) -> str:
        """The model's name for clients; the built-in model's is not its path."""
        return self.served_model_name or ("neuron-textgen/demo" if self.is_demo else self.model_id)

    @property
    def address(self) -> str:
        """The server's URL for a browser on this machine."""
        host = "localhost" if self.hostname in ("0.0.0.0", "::", "127.0.0.1") else self.hostname
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def is_local(self) -> bool:
        """Whether the model is a folder or file, or a path that does not exist and cannot be a hub id."""
        repository = self.model_id.partition(":")[0]
        is_path = self.model_id.startswith(("/", "./", "../", "~")) or repository.count("/") > 1
        return is_path or os.path.exists(self.model_id)

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file: a path, or `owner/name:file.gguf` on the hub."""
        return self.model_id.endswith(".gguf")

    def with_manifest(self, manifest: Manifest, memory_bytes: int | None = None) -> Config:
        """Returns a copy in which `max_batch_size`, `max_input_tokens` and `max_total_tokens` are set. Unset
        ones follow from the model and from `memory_bytes`, the device's memory (None: unknown). A given
        `max_batch_size` is lowered to the slots that fit into `max_batch_total_tokens`.

        An unset `max_total_tokens` becomes the largest power of two for which the KV cache of all slots fits
        into MEMORY_SHARE of the memory, at least DEFAULT_MAX_TOTAL_TOKENS, but no more than the model's
        `length_limit` or, without one, its context length. Raises ConfigError for a `max_total_tokens` beyond
        the context length, and if limits of the copy contradict each other.
        """
        longest = manifest.max_positions
        slots = self.max_batch_size or DEFAULT_BATCH_SIZE
        fitting = max(self._fitting_tokens(manifest, memory_bytes) // slots, DEFAULT_MAX_TOTAL_TOKENS)
        most = manifest.length_limit or longest or DEFAULT_MAX_TOTAL_TOKENS
        total = self.max_total_tokens or min(most, 1 << fitting.bit_length() - 1)  # a power of two
        if longest and total > longest:
            raise ConfigError(
                f"--max-total-tokens {total} (MAX_TOTAL_TOKENS) exceeds the context length of "
                f"{self.model_name}; give at most {longest}"
            )
        return dataclasses.replace(
            self,
            max_batch_size=self.slots(total, DEFAULT_BATCH_SIZE),
            max_total_tokens=total,
            max_input_tokens=self.max_input_tokens or total - 1,
        )

    def with_prefix_slots(self, manifest: Manifest, memory_bytes: int | None) -> Config:
        """Returns a copy with `prefix_slots`. If unset, these are as many as fit into the memory (None:
        unknown), at least `max_batch_size` and, beyond that, at most MAX_DEFAULT_PREFIX_SLOTS. `self` is a
        result of `with_manifest`.

        Without prefix caching there are as many slots as run at a time. Raises ConfigError for fewer than
        these, and for a given `prefix_slots` without prefix caching.
        """
        least = self.max_batch_size
        slots = self.prefix_slots
        if slots is None:
            slots = least
            if self.prefix_reuse:
                fitting = self._fitting_tokens(manifest, memory_bytes) // self.max_total_tokens
                slots = max(least, min(fitting, MAX_DEFAULT_PREFIX_SLOTS))
        elif not self.prefix_reuse:
            raise ConfigError(
                f"--prefix-slots {slots} (PREFIX_SLOTS) needs prefix caching, which --prefix-reuse false "
                "(PREFIX_REUSE) turns off; leave one of them out"
            )
        if slots < least:
            raise ConfigError(
                f"--prefix-slots {slots} (PREFIX_SLOTS) is less than the {least} requests that run at a "
                "time; raise it, or lower --max-batch-size (MAX_BATCH_SIZE)"
            )
        return dataclasses.replace(self, prefix_slots=slots)

    def _fitting_tokens(self, manifest: Manifest, memory_bytes: int | None) -> int:
        """Returns how many tokens of all slots fit into MEMORY_SHARE of the memory and
        `max_batch_total_tokens`; 0: unknown."""
        if not memory_bytes or not manifest.kv_bytes:
            return 0
        token_bytes = manifest.kv_bytes * KV_SHARE_OF_FLOAT32.get(self.kv_cache_dtype, 1)
        fitting = int(memory_bytes * MEMORY_SHARE / token_bytes)
        return min(fitting, self.max_batch_total_tokens or fitting)

    def slots(self, length: int, default: int) -> int:
        """How many slots of `length` tokens the settings allow: `max_batch_size` or, if it is unset,
        `default`, but no more than fit into `max_batch_total_tokens`: 0 if it is less than `length`."""
        slots = self.max_batch_size or default
        if self.max_batch_total_tokens:
            return min(slots, self.max_batch_total_tokens // length)
        return slots

    def body_limit(self, reads_images: bool) -> int:
        """`payload_limit`, or its default for a model that reads images or does not; in bytes."""
        return self.payload_limit or (IMAGE_PAYLOAD if reads_images else TEXT_PAYLOAD)

    def set_up_log(self) -> None:
        """Makes this process log as the settings say."""
        logs.set_up(self.log_level, self.json_output)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Config:
        # Unlike msgspec, json reads surrogates: the bytes of a working folder that are not UTF-8.
        return msgspec.convert(json.loads(text), cls)

    def to_shell(self) -> str:
        """Returns the assignments that entrypoint.sh reads, one a line, of the settings IN_SHELL. Seconds are
        also there as milliseconds, in variables that end in `_ms`: bash computes with integers."""
        lines = []
        for name in IN_SHELL:
            value = getattr(self, name)
            if isinstance(value, float):
                lines.append(f"{name}_ms={math.ceil(value * 1000)}")
                value = f"{value:g}"
            lines.append(f"{name}={shlex.quote(str(value))}")
        return "\n".join(lines) + "\n"


for _entry in dataclasses.fields(Config):
    if not _entry.metadata["names"]:
        _entry.metadata["names"].append(_entry.name.upper())

IN_SHELL = (
    "model_cache",
    "startup_timeout",
    "stuck_timeout",
    "graceful_termination_timeout",
    "log_level",
    "json_output",
)
SETTINGS = {"--" + entry.name.replace("_", "-"): entry for entry in dataclasses.fields(Config)}
# The groups of --help and docs/settings.md: each begins with a setting and ends where the next one begins.
SETTING_GROUPS = {
    "--model-id": "Model",
    "--device": "Device and precision",
    "--tp-degree": "Slots and context length",
    "--prefill-buckets": "Neuron",
    "--max-concurrent-requests": "Queue, prefill and caching",
    "--max-client-batch-size": "Limits of a request",
    "--hostname": "HTTP server",
    "--startup-timeout": "Startup and shutdown",
    "--otlp-endpoint": "Traces, profiles and logs",
}
# Flags whose values make a list.
REPEATABLE = ("--allowed-media-domains", "--cors-allow-origin", "--lora-adapters", "--neuron-config")
DISABLED_VALUES = ("0", "false", "none", "off")  # values that disable a setting


class CompatibilityAlias(NamedTuple):
    """A flag or variable of TGI's launcher, TGI-Gaudi, TorchServe, vLLM or an older Neuron image that is not
    a setting here."""

    effect: str  # same_as, no_effect or not_supported
    neutral: str | None  # another value without effect
    text: str  # what it sets, beginning with the flag (same_as), or why it has no effect


def _read_aliases() -> Iterator[tuple[str, CompatibilityAlias]]:
    """Yields each flag or variable in compatibility_aliases.json, and what it stands for. `NAME=1` in that
    file is the flag or variable NAME, whose value 1 has no effect."""
    tables = json.loads((HERE / "compatibility_aliases.json").read_text(encoding="utf-8"))
    for effect, table in tables.items():
        for names, text in table.items():
            for name in names.split():
                name, _, neutral = name.partition("=")
                yield name, CompatibilityAlias(effect, neutral or None, text)


COMPATIBILITY_ALIASES = dict(_read_aliases())


def _names_given(flag: str, given: Mapping[str, str]) -> list[str]:
    """Returns the names of a setting that have a value; the value of the first name counts. Flags come before
    variables, own names before compatibility aliases. An alias whose value has no effect is left out.

    flag: the setting's own, such as "--port". given: all values, by the names of flags and variables.
    """
    others = [
        name
        for name, other in COMPATIBILITY_ALIASES.items()
        if other.effect == "same_as" and other.text.split()[0] == flag and given.get(name) != other.neutral
    ]
    names = (flag, *SETTINGS[flag].metadata["names"], *others)
    return sorted((name for name in names if name in given), key=lambda name: not name.startswith("-"))


def _log_lines_of_aliases(given: Mapping[str, str]) -> list[str]:
    """Returns lines for the log about the settings of other servers in `given`: what such a setting sets, why
    it has no effect, or which setting is used instead. There is no line for a neutral value, but for a
    setting that never has an effect. Raises ConfigError if a setting is not supported and its value would
    have an effect.

    given: values of flags and variables by name, also of this server's own.
    """
    lines = []
    for name, value in given.items():
        family = name.split("_")[0] + "_*"  # TS_*: any with TS_
        other = COMPATIBILITY_ALIASES.get(name) or COMPATIBILITY_ALIASES.get(family)
        if other is None:
            continue
        if other.effect == "no_effect":
            lines.append(f"{name} has no effect: {other.text}")
        elif other.effect == "not_supported":
            if value.lower() not in (other.neutral, *DISABLED_VALUES):
                raise ConfigError(f"{name} is not supported: {other.text}")
        elif value != other.neutral:
            first = _names_given(other.text.split()[0], given)[0]
            if name == first:
                lines.append(f"{name} is read as {other.text}")
            else:
                lines.append(f"{name} is ignored: {first} is set")
    return lines


USAGE = """entrypoint.sh [serve] [flags]
       entrypoint.sh compile [flags]  (compiles for Neuron: compile --help)
       entrypoint.sh plan [flags]     (what fits on Neuron: plan --help)

Serves a large language model over TGI's, OpenAI's and Anthropic's HTTP APIs.
A flag overrides its environment variables, which are listed in brackets."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for arguments that it cannot parse."""

    def error(self, message: str) -> None:
        raise ConfigError(message)


@functools.cache
def _parser() -> Parser:
    """Returns the parser of the command line, always the same one, which also takes the flags of other
    servers. It gives a list of strings for each flag, in the order of the command line, and None for a flag
    that is absent. A switch without a value has "true". Raises ConfigError for another setting without its
    value; --help and --version print, and raise SystemExit."""
    formatter = functools.partial(argparse.HelpFormatter, max_help_position=6)
    parser = Parser(usage=USAGE, formatter_class=formatter, allow_abbrev=False)
    version = f"neuron-textgen {VERSION}"
    parser.add_argument("-V", "--version", action="version", version=version, help="Print the version.")
    group = parser
    for flag, entry in SETTINGS.items():
        if flag in SETTING_GROUPS:
            group = parser.add_argument_group(SETTING_GROUPS[flag])
        about = entry.metadata
        value: Json = {"metavar": "X"}
        action = "append"
        if entry.type == "bool":
            value = {"nargs": "?", "const": "true", "metavar": "true|false"}
        if flag in REPEATABLE:
            value = {"nargs": "+", "metavar": "X"}
            action = "extend"
        text = f"{about['help']} Default: {about['shown']}. [{', '.join(about['names'])}]"
        group.add_argument(flag, *about["flags"], dest=flag, action=action, help=text, **value)
    for name in COMPATIBILITY_ALIASES:
        if name.startswith("-"):
            parser.add_argument(name, dest=name, action="extend", nargs="*", help=argparse.SUPPRESS)
    return parser


def _values_given(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of all flags and of the whole environment, by name (`--port`, `PORT`), as texts
    without spaces at their ends. An empty variable counts as unset, and so does a HOSTNAME that is no IP
    address; an empty flag stays. Several values of a flag are joined by commas.

    Raises ConfigError for an unknown flag, a flag that lacks its value, one that is given twice although it
    takes no list, and a variable for API keys that is only spaces. --help and --version print, and raise
    SystemExit.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    for name in ("API_KEY", "VLLM_API_KEY", "API_KEY_FILE"):
        if environ.get(name) and name not in given:
            raise ConfigError(
                f"{name} is only spaces: give a key, or leave it empty for a server without one"
            )
    try:
        ipaddress.ip_address(given.get("HOSTNAME", ""))
    except ValueError:
        given.pop("HOSTNAME", None)  # the machine's name
    options, unknown = _parser().parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        nearest = difflib.get_close_matches(flag, SETTINGS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"unknown argument {flag!r}{hint} (--help lists the settings)")
    for flag, values in vars(options).items():
        if values is None:
            continue
        if [] in values:  # argparse drops a value that is "--"
            raise ConfigError(f"{flag} needs a value")
        if len(values) > 1 and flag in SETTINGS and flag not in REPEATABLE:
            raise ConfigError(f"{flag} is given twice")
        given[flag] = ",".join(values).strip()
    return given


def _parse_value(name: str, value: str, entry: dataclasses.Field) -> Any:
    """Returns the value of a setting, in its type. name: the flag or variable that has this value, for the
    error. Raises ConfigError for an empty value, for control characters, for bytes that are not UTF-8, which
    are surrogates in `value`, and for a value that the setting's parser rejects. An error does not show an
    API key."""
    if not value:
        raise ConfigError(f"{name} needs a value")
    parse = entry.metadata["parse"] or PARSERS[entry.type.removesuffix(" | None")]
    try:
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            raise ValueError("must be UTF-8 without control characters")
        return parse(value)
    except ValueError as error:
        shown = "" if entry.name == "api_key" else f" {value!r}"
        raise ConfigError(f"{name}{shown}: {error}") from None


@contextlib.contextmanager
def _reading(model: str | Path) -> Iterator[None]:
    """Turns an OSError of the body into a ConfigError that names the path of the model."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--model-id {model} cannot be read: {error.strerror}") from None


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Reads the settings into a Config. Flags override environment variables, which override defaults. argv:
    the flags, without the program's name.

    Without a model id, the model in SAGEMAKER_MODEL is served if it has a config.json. The path of a local
    model becomes absolute; clients still see the name that was given. A hub id is not looked up, and a GGUF
    file is not read. Raises ConfigError for a wrong value, an unknown or repeated flag, settings that
    contradict each other, another server's setting that is not supported, and a local folder that is missing,
    cannot be read, or that `Manifest.read` rejects. --help and --version print, and raise SystemExit.
    """
    given = _values_given(argv, environ)
    _log_lines_of_aliases(given)
    if "MAX_INPUT_TOKENS" in given and "MAX_INPUT_LENGTH" in given:
        raise ConfigError(
            "MAX_INPUT_TOKENS and its older name MAX_INPUT_LENGTH are both set; leave out MAX_INPUT_LENGTH"
        )
    values = {}
    for flag, entry in SETTINGS.items():
        if names := _names_given(flag, given):
            values[entry.name] = _parse_value(names[0], given[names[0]], entry)
    with _reading(SAGEMAKER_MODEL):
        if "model_id" not in values and (SAGEMAKER_MODEL / "config.json").is_file():
            values["model_id"] = str(SAGEMAKER_MODEL)
    config = Config(**values)
    if config.model_id == TRIAL_MODEL or not config.is_local:
        return config
    path = _absolute_path(config.model_id)
    if path != config.model_id:  # child processes have other working folders; clients see what was given
        config = dataclasses.replace(config, model_id=path, served_model_name=config.model_name)
    with _reading(path):
        if not has_gguf(Path(path)):
            Manifest.read(path)
    return config


def resolved() -> Config:
    """The configuration that `entrypoint.sh` resolved for this run. Raises KeyError outside of a run."""
    return Config.from_json((run_dir() / "config.json").read_bytes())


def listen(config: Config) -> socket.socket:
    """Returns a socket that listens on the server's address. Raises ConfigError if the address cannot be
    used."""
    family = socket.AF_INET6 if ":" in config.hostname else socket.AF_INET
    is_dual = config.hostname == "::" and socket.has_dualstack_ipv6()  # IPv4, too, as in TGI
    try:
        return socket.create_server(
            (config.hostname, config.port), family=family, backlog=2048, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise ConfigError(
            f"port {config.port} of {config.hostname} cannot be used: {os.strerror(error.errno)};"
            " choose another with --port (PORT) or --hostname (HOSTNAME)"
        ) from error


def main(argv: Sequence[str]) -> int:
    """Checks the settings, logs what is served and the effects of other servers' settings, and returns the
    exit code: 2, with one line on stderr, if something cannot be used, else 0.

    In a run, writes config.json and settings.sh into the run's folder, and checks the limits of the process
    and, for a moment, that it can listen. Without a run, prints the configuration as JSON, also the API key.
    --help and --version print, and raise SystemExit.
    """
    folder = run_dir() if "NEURON_TEXTGEN_RUN_DIR" in os.environ else None
    try:
        if folder:
            check_process_limits(folder)
        config = parse(argv, os.environ)
        if folder:
            listen(config).close()  # before anything is loaded, so the reason is the only line
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config.set_up_log()
    logger = logging.getLogger("config")
    key = "requests need the API key" if config.needs_key else "requests need no API key (--api-key)"
    logger.info("Starting neuron-textgen %s; model: %s; %s", VERSION, config.model_name, key)
    for line in _log_lines_of_aliases(_values_given(argv, os.environ)):
        logger.warning("%s", line)
    if not folder:
        print(config.to_json())
        return 0
    try:
        (folder / "config.json").write_text(config.to_json())
        (folder / "settings.new").write_bytes(os.fsencode(config.to_shell()))
        (folder / "settings.new").rename(folder / "settings.sh")  # the script waits for all of it
    except OSError as error:
        print(f"error: {explained(error, str(folder)) or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
