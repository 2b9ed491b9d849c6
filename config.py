"""What to serve: flags, environment variables and the model's own files become one frozen `Config`.

This layer owns every setting: its flag, its environment names, its default, its meaning and its check. `--help` and the
table of the README are printed from the same fields. It also reads the facts that a checkpoint tells of itself
(`Manifest`) and sets up logging, because both are needed before anything else runs. It knows no HTTP, no socket, no torch.

    python3 config.py [flags]     checks everything and prints the resolved configuration as JSON
    python3 config.py --help      the table of settings          (--markdown: the same for the README)
"""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import ipaddress
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
HERE = Path(__file__).resolve().parent
DEMO_MODEL = HERE / "demo" / "model"
SAGEMAKER_MODEL = Path("/opt/ml/model")  # where SageMaker unpacks an endpoint's model
DEFAULT_MAX_TOTAL_TOKENS = 2048
DEFAULT_BATCH_SIZE = 4
DEVICE_TOP_K = 256  # most tokens that a device draws from, with SAMPLING=device

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
}


class ConfigError(Exception):
    """A setting or a model folder that cannot be served; the message is one line for the person who started us."""


def _text(value: str) -> str:
    return value


def _file(value: str) -> str:
    if not Path(value).expanduser().is_file():
        raise ValueError("there is no such file")
    return str(Path(value).expanduser().absolute())


def _folder(value: str) -> str:
    return str(Path(value).expanduser().absolute())


def _whole(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _count(value: str) -> int:
    number = _whole(value)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _port(value: str) -> int:
    number = _whole(value)
    if not 1 <= number <= 65535:
        raise ValueError("must be between 1 and 65535")
    return number


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("must be a positive number")
    return number


def _share(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("must be a number of at least 0")
    return number


def _flag(value: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
    if value.lower() not in words:
        raise ValueError("must be true or false")
    return words[value.lower()]


def _ip(value: str) -> str:
    return str(ipaddress.ip_address("127.0.0.1" if value == "localhost" else value))


def _one_device(value: str) -> int:
    if _count(value) != 1:
        raise ValueError("must be 1: this version does not spread a model over several devices")
    return 1


def _quantize(value: str) -> str | None:
    if value.lower() not in ("none", "int8", "int4"):
        raise ValueError("must be none, int8 or int4: no other quantized weights are served")
    return None if value.lower() == "none" else value.lower()


def _counts(value: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part.strip()) for part in value.split(",")}))


def _origins(value: str) -> str:
    origins = [origin.strip().rstrip("/") for origin in value.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ValueError(f"{origin!r} is no origin; one looks like https://example.com")
    return ",".join(origins)


def _one_of(*choices: str):
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return parse


def _dtype(value: str) -> str:
    if value.lower() not in DTYPES:
        raise ValueError(f"must be one of {', '.join(dict.fromkeys(DTYPES.values()))}")
    return DTYPES[value.lower()]


def setting(default: Any, parse, *names: str, help: str, default_help: str | None = None) -> Any:
    """One setting: `names` are its environment variables, the first of which also names the flag."""
    return field(default=default, metadata={"parse": parse, "names": names, "help": help, "default_help": default_help})


@dataclass(frozen=True)
class Config:
    """Everything that a person can set. `None` means: take what the model says (see `with_manifest`)."""

    model_id: str = setting(
        str(DEMO_MODEL),
        _text,
        "MODEL_ID",
        "HF_MODEL_ID",
        help="Model to serve: a hub id or a local folder.",
        default_help="the model in /opt/ml/model (SageMaker), else the built-in demonstration model",
    )
    revision: str | None = setting(None, _text, "REVISION", "HF_MODEL_REVISION", help="Branch, tag or commit of a hub model.")
    huggingface_hub_cache: str | None = setting(
        None,
        _text,
        "HUGGINGFACE_HUB_CACHE",
        "HF_HUB_CACHE",
        help="Folder that downloaded models are kept in.",
        default_help="the hub library's",
    )
    trust_remote_code: bool = setting(
        False,
        _flag,
        "TRUST_REMOTE_CODE",
        "HF_MODEL_TRUST_REMOTE_CODE",
        help="Run Python code that comes with the model. Only for models that you trust.",
    )
    tokenizer_config_path: str | None = setting(
        None,
        _file,
        "TOKENIZER_CONFIG_PATH",
        help="A tokenizer_config.json to take the chat template and the special tokens from.",
        default_help="the model's own",
    )
    device: str = setting(
        "auto",
        _one_of("auto", "cpu", "cuda", "neuron"),
        "DEVICE",
        help="auto, cpu, cuda or neuron; auto takes what the machine has.",
    )
    dtype: str = setting(
        "auto",
        _dtype,
        "DTYPE",
        "HF_AUTO_CAST_TYPE",
        help="Arithmetic: auto, float32, bfloat16 or float16. auto is the checkpoint's own; on a CPU float32, "
        "or bfloat16 where both the checkpoint and the CPU have it.",
    )
    quantize: str | None = setting(
        None,
        _quantize,
        "QUANTIZE",
        "HF_MODEL_QUANTIZE",
        help="Compress the weights: none, int8, or int4 (on a CPU). On a CPU this needs the package nncf at the first start.",
    )
    model_cache: str = setting(
        os.path.expanduser("~/.cache/neuron-textgen"),
        _folder,
        "MODEL_CACHE",
        help="Folder for models converted for CPUs and for compiled sampling loops. No other user may write to it.",
        default_help="~/.cache/neuron-textgen",
    )
    model_cache_size: float = setting(
        20.0,
        _positive,
        "MODEL_CACHE_SIZE",
        help="Gigabytes that converted models may take; the least recently used ones are removed first.",
    )
    threads: int | None = setting(
        None,
        _count,
        "THREADS",
        help="Threads that the model runs on where it runs on a CPU.",
        default_help="the processors that this process may use",
    )
    cuda_graphs: str | None = setting(None, _text, "CUDA_GRAPHS", help="No effect; accepted because TGI has it.")
    num_shard: int = setting(
        1, _one_device, "NUM_SHARD", "SM_NUM_GPUS", help="Devices that a model is spread over. Only 1 so far."
    )
    tp_degree: int | None = setting(
        None,
        _count,
        "TP_DEGREE",
        "HF_NUM_CORES",
        help="NeuronCores that a model is spread over.",
        default_help="what leaves a core the fewest bytes, of those that there are or NEURON_RT_VISIBLE_CORES names",
    )
    max_batch_size: int | None = setting(
        None,
        _count,
        "MAX_BATCH_SIZE",
        "HF_BATCH_SIZE",
        help="Slots: how many requests are decoded together. The others wait in line.",
        default_help=f"{DEFAULT_BATCH_SIZE}; on Neuron what fits, up to 32",
    )
    max_input_tokens: int | None = setting(
        None,
        _count,
        "MAX_INPUT_TOKENS",
        "MAX_INPUT_LENGTH",
        help="Longest prompt, in tokens.",
        default_help="max_total_tokens - 1",
    )
    max_total_tokens: int | None = setting(
        None,
        _count,
        "MAX_TOTAL_TOKENS",
        "HF_SEQUENCE_LENGTH",
        help="Longest prompt plus answer, in tokens: the window of a slot.",
        default_help=f"the model's window, at most {DEFAULT_MAX_TOTAL_TOKENS}; on Neuron what fits, up to 4096",
    )
    prefill_buckets: tuple[int, ...] | None = setting(
        None,
        _counts,
        "PREFILL_BUCKETS",
        help="Lengths of prompts that are compiled for Neuron, separated by commas; max_input_tokens is always one.",
        default_help="powers of two from 128",
    )
    position_buckets: tuple[int, ...] | None = setting(
        None,
        _counts,
        "POSITION_BUCKETS",
        help="Lengths of prompt plus answer that are compiled for Neuron; max_total_tokens is always one.",
        default_help="powers of two from 128",
    )
    compile_workers: int | None = setting(
        None,
        _count,
        "COMPILE_WORKERS",
        help="Programs that are compiled for Neuron at the same time; each takes gigabytes of memory.",
        default_help="one for each processor and 8 GiB of memory",
    )
    sampling: str | None = setting(
        None,
        _one_of("host", "device"),
        "SAMPLING",
        help="Where tokens are chosen: host or device. device is for Neuron, and refuses the parameters that only host has.",
        default_help="host",
    )
    max_concurrent_requests: int = setting(
        128,
        _count,
        "MAX_CONCURRENT_REQUESTS",
        help="Requests running and waiting; one more is answered with 429.",
    )
    max_queue_time: float | None = setting(
        None,
        _positive,
        "MAX_QUEUE_TIME",
        help="Seconds that a request may wait for a slot; then it is answered with 429.",
        default_help="no limit",
    )
    max_batch_prefill_tokens: int | None = setting(
        None,
        _count,
        "MAX_BATCH_PREFILL_TOKENS",
        help="Prompt tokens per decode step of the running requests: beside it with OpenVINO, before it elsewhere, where one "
        "prompt (or one chunk) always may run.",
        default_help="with OpenVINO 32 in bfloat16 and 16 in float32; 128 elsewhere",
    )
    waiting_served_ratio: float = setting(
        0.0,
        _share,
        "WAITING_SERVED_RATIO",
        help="Waiting requests, as a share of the running ones, before a prompt may interrupt these. No effect with OpenVINO, "
        "where prompts run beside them.",
    )
    max_waiting_tokens: int = setting(
        20,
        _count,
        "MAX_WAITING_TOKENS",
        help="Decode steps after which a prompt is run whatever waiting_served_ratio says.",
    )
    max_client_batch_size: int = setting(
        4,
        _count,
        "MAX_CLIENT_BATCH_SIZE",
        help="Most prompts of a request (`/v1/completions`, `/vertex`), and most choices (`n`) for each.",
    )
    max_best_of: int = setting(2, _count, "MAX_BEST_OF", help="Largest `best_of` of a request.")
    max_stop_sequences: int = setting(4, _count, "MAX_STOP_SEQUENCES", help="Most stop sequences of a request.")
    max_top_n_tokens: int = setting(5, _count, "MAX_TOP_N_TOKENS", help="Most `top_n_tokens` of a request.")
    hostname: str = setting(
        "0.0.0.0",
        _ip,
        "HOSTNAME",
        help="IP address to listen on. A HOSTNAME variable that is no IP address (containers and shells set one) is not used.",
    )
    port: int = setting(
        8080, _port, "SAGEMAKER_BIND_TO_PORT", "PORT", help="Port to listen on. What SageMaker sets comes before PORT."
    )
    api_key: str | None = setting(
        None, _text, "API_KEY", help="When set, all but health and metrics asks for `Authorization: Bearer` with this key."
    )
    cors_allow_origin: str = setting(
        "*",
        _origins,
        "CORS_ALLOW_ORIGIN",
        help="Origins that browsers may call from, separated by commas; the flag may be repeated.",
    )
    web_concurrency: int = setting(2, _count, "WEB_CONCURRENCY", help="Web processes (HTTP, tokenizing, streaming).")
    payload_limit: int = setting(
        2_000_000, _count, "PAYLOAD_LIMIT", help="Largest request body, in bytes; a larger one is answered with 413."
    )
    client_timeout: float = setting(
        30.0,
        _positive,
        "CLIENT_TIMEOUT",
        help="Seconds that a client may take to send a request, or not read while it is answered.",
    )
    response_deadline: float | None = setting(
        None,
        _positive,
        "RESPONSE_DEADLINE",
        help="Seconds after which an answer that is not streamed ends with the text so far, as `length`.",
        default_help="55 on `/invocations` (SageMaker waits 60), else none",
    )
    compute_type: str | None = setting(
        None, _text, "COMPUTE_TYPE", help="What the header `x-compute-type` says.", default_help="the device"
    )
    startup_timeout: float = setting(
        3600.0, _positive, "STARTUP_TIMEOUT", help="Seconds that the model may take to become ready."
    )
    stuck_timeout: float = setting(
        120.0,
        _positive,
        "STUCK_TIMEOUT",
        help="Seconds that the device may be stuck (many times longer at a step than usual); then the server ends with code 1.",
    )
    graceful_termination_timeout: float = setting(
        25.0,
        _positive,
        "GRACEFUL_TERMINATION_TIMEOUT",
        help="Seconds that running requests get to finish after SIGTERM.",
    )
    json_output: bool = setting(False, _flag, "JSON_OUTPUT", help="Log one JSON object a line.")

    def __post_init__(self):
        if self.max_total_tokens and self.max_total_tokens < 2:
            raise ConfigError(f"--max-total-tokens {self.max_total_tokens}: must be at least 2, one token in and one out")
        if self.max_input_tokens and self.max_total_tokens and self.max_input_tokens >= self.max_total_tokens:
            raise ConfigError(
                f"`max_input_tokens`({self.max_input_tokens}) must be < `max_total_tokens`({self.max_total_tokens}): "
                "lower --max-input-tokens (MAX_INPUT_TOKENS) or raise --max-total-tokens (MAX_TOTAL_TOKENS)"
            )

    @property
    def is_demo(self) -> bool:
        return Path(self.model_id) == DEMO_MODEL

    @property
    def model_name(self) -> str:
        """What clients see as the model's id: never a path of this machine for the built-in model."""
        return "neuron-textgen/demo" if self.is_demo else self.model_id

    @property
    def is_local(self) -> bool:
        """A folder, or something that can only be meant as one (a path that does not exist is not a hub id)."""
        return (
            os.path.isdir(self.model_id) or self.model_id.startswith(("/", "./", "../", "~")) or (self.model_id.count("/") > 1)
        )

    def with_manifest(self, manifest: Manifest) -> Config:
        """Fills in what the user left open from what the model says; raises ConfigError where the two contradict."""
        window = manifest.max_positions
        total = self.max_total_tokens or min(window or DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS)
        if window and total > window:
            raise ConfigError(
                f"--max-total-tokens {total} (MAX_TOTAL_TOKENS) is more than the {window} positions that {self.model_name} "
                f"was made for; give at most {window}"
            )
        return dataclasses.replace(self, max_total_tokens=total, max_input_tokens=self.max_input_tokens or total - 1)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Config:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()})


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's `config.json` and `generation_config.json` say of it."""

    model_type: str
    max_positions: int | None  # longest sequence the positions were trained for, in tokens
    eos_token_ids: tuple[int, ...]
    is_compiled: bool = False  # for Neuron

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Reads a model folder; raises ConfigError with the reason when it holds no model."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--model-id {folder}: there is no such folder")
        config = read_json(folder / "config.json", required=True)
        if not isinstance(config.get("model_type"), str):
            raise ConfigError(f"{folder / 'config.json'} names no `model_type`, so nothing here can load it")
        eos: list[int] = []
        for source in (config, read_json(folder / "generation_config.json")):
            ids = source.get("eos_token_id")
            eos += [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
        text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        windows = (text_config.get(k) for k in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
        return cls(
            model_type=config["model_type"],
            max_positions=next((w for w in windows if isinstance(w, int) and w > 0), None),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            is_compiled="neuron" in config,
        )


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """A JSON object from a model folder: `{}` when the file is not there, ConfigError when it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path.parent} holds no {path.name}, so it is no model folder") from None
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold a JSON object, not {type(data).__name__}")
    return data


def flag_name(setting: dataclasses.Field) -> str:
    return "--" + setting.name.replace("_", "-")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Flags beat environment variables, which beat defaults.

    Raises ConfigError naming the setting, the value and what it must be; an unknown flag names the nearest known one, and a
    local folder that holds no model says so.
    """
    values = {}
    for entry in dataclasses.fields(Config):
        values.update(_from_environment(entry, environ))
    values.update(_from_flags(argv))
    if "model_id" not in values and (SAGEMAKER_MODEL / "config.json").is_file():
        values["model_id"] = str(SAGEMAKER_MODEL)
    config = Config(**values)
    if config.is_local:
        Manifest.read(config.model_id)
    return config


def _from_environment(entry: dataclasses.Field, environ: Mapping[str, str]) -> dict[str, Any]:
    given = {name: environ[name] for name in entry.metadata["names"] if environ.get(name, "").strip()}
    if entry.name == "hostname" and "HOSTNAME" in given and not _is_ip(given["HOSTNAME"]):
        return {}
    if entry.name == "max_input_tokens" and len(given) > 1:
        raise ConfigError(
            f"Both `max_input_tokens` ({given['MAX_INPUT_TOKENS']}) and `max_input_length` ({given['MAX_INPUT_LENGTH']}) are "
            "set. Please define only `max_input_tokens`: `max_input_length` is its older name"
        )
    for name, value in given.items():  # the first name is the canonical one and wins
        return {entry.name: _parse_value(entry, name, value.strip())}
    return {}


def _is_ip(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _parse_value(entry: dataclasses.Field, source: str, value: str) -> Any:
    try:
        return entry.metadata["parse"](value)
    except ValueError as error:
        raise ConfigError(f"{source} {value!r}: {error}") from None


def _from_flags(argv: Sequence[str]) -> dict[str, Any]:
    known = {flag_name(entry): entry for entry in dataclasses.fields(Config)}
    known["--max-input-length"] = known["--max-input-tokens"]
    known["-p"] = known["--port"]
    values: dict[str, Any] = {}
    words = list(argv)
    while words:
        flag, has_value, value = words.pop(0).partition("=")
        if flag not in known:
            nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"unknown argument {flag!r}{hint} (--help lists the settings)")
        entry = known[flag]
        if entry.name in values and entry.name != "cors_allow_origin":
            raise ConfigError(f"{flag} is given twice")
        if not has_value and entry.metadata["parse"] is _flag:
            value = words.pop(0) if words and words[0].lower() in ("true", "false") else "true"
        elif not has_value:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
        if not value.strip():
            raise ConfigError(f"{flag} needs a value")
        if entry.name == "cors_allow_origin" and entry.name in values:
            value = f"{values[entry.name]},{value}"
        values[entry.name] = _parse_value(entry, flag, value)
    return values


def _default_text(entry: dataclasses.Field) -> str:
    if entry.metadata["default_help"]:
        return entry.metadata["default_help"]
    default = entry.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return "none" if default is None else str(default)


def help_text(width: int) -> str:
    """The table of settings for a terminal of `width` columns."""
    lines = [
        "neuron-textgen: serves a large language model over TGI's and OpenAI's HTTP APIs.",
        "",
        "Usage: entrypoint.sh [serve] [flags]   serves; a flag beats its environment variable",
        "       entrypoint.sh compile [flags]   compiles a model for Neuron (compile --help)",
        "       entrypoint.sh plan [flags]      tells what fits on Neuron machines (plan --help)",
        "",
    ]
    lines = [part for line in lines for part in (textwrap.wrap(line, width) or [""])]
    for entry in dataclasses.fields(Config):
        lines.append(f"  {flag_name(entry)}  [{', '.join(entry.metadata['names'])}]")
        text = f"{entry.metadata['help']} Default: {_default_text(entry)}."
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def markdown_table() -> str:
    """The same table for the README."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for entry in dataclasses.fields(Config):
        names = ", ".join(f"`{name}`" for name in entry.metadata["names"])
        rows.append(f"| `{flag_name(entry)}` | {names} | {_default_text(entry)} | {entry.metadata['help']} |")
    return "\n".join(rows)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = {"message": message, **getattr(record, "fields", {})}
        return json.dumps({"timestamp": stamp, "level": record.levelname, "target": record.name, "fields": fields})


class _PlainFormatter(logging.Formatter):
    converter = time.gmtime

    def __init__(self):
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)-5s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return super().format(record) + "".join(f" {key}={value}" for key, value in fields.items())


def set_up_logging(json_output: bool) -> None:
    """Logs go to stderr, a line an event; `logger.info(message, extra={"fields": {...}})` adds named values to it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json_output else _PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelName(os.environ.get("LOG_LEVEL", "info").upper())
    root.setLevel(level if isinstance(level, int) else logging.INFO)


def run_dir() -> Path:
    """The private folder of this run: the resolved configuration and the socket between the processes."""
    return Path(os.environ["NEURON_TEXTGEN_RUN_DIR"])


def load() -> Config:
    """The configuration that `entrypoint.sh` resolved for this run."""
    return Config.from_json((run_dir() / "config.json").read_bytes())


def socket_address() -> str:
    return f"ipc://{run_dir() / 'worker.sock'}"


def die_with_parent() -> None:
    """Has the kernel end this process when the one that started it dies: nothing may survive to hold the device."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(help_text(min(shutil.get_terminal_size((100, 24)).columns, 110)))
        return 0
    if argv == ["--markdown"]:
        print(markdown_table())
        return 0
    try:
        config = parse(argv, os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    set_up_logging(config.json_output)
    logging.getLogger("config").info("neuron-textgen %s starts; model: %s", VERSION, config.model_name)
    if config.cuda_graphs:
        logging.getLogger("config").warning("--cuda-graphs (CUDA_GRAPHS) has no effect; leave it out")
    print(config.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
