"""Every setting is reachable by flag and variable, and checked at the start in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import config
from config import (
    COMPATIBILITY_ALIASES,
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_TOTAL_TOKENS,
    DEMO_MODEL,
    MAX_DEFAULT_PREFIX_SLOTS,
    SETTING_GROUPS,
    SETTINGS,
    Config,
    parse,
)
from manifest import Manifest
from run import HERE, ConfigError, socket_address

HUB_MODEL = {"MODEL_ID": "someone/model"}

# For each setting two values as they are written, and what they mean.
COUNTS, SECONDS, SWITCH = [("7", 7), ("9", 9)], [("7", 7.0), ("0.5", 0.5)], [("true", True), ("false", False)]
# Any files whose lines could be keys.
KEY_FILES = (HERE / ".gitignore", HERE / "tests" / "clients" / "requirements-aider.txt")
VALUES = {
    "model_id": [("someone/model", "someone/model"), ("other/model", "other/model")],
    "revision": [("main", "main"), ("abc123", "abc123")],
    "huggingface_hub_cache": [("/data", "/data"), ("cache", os.path.abspath("cache"))],
    "tokenizer_config_path": [(str(HERE / "README.md"), str(HERE / "README.md")), (__file__, __file__)],
    "chat_template_kwargs": [('{"a": 1}', '{"a": 1}'), ("{}", "{}")],
    "mm_processor_kwargs": [('{"size": 9}', '{"size": 9}'), ("{}", "{}")],
    "tool_parser": [("hermes", "hermes"), ("GLM47", "glm47")],
    "reasoning_parser": [("think", "think"), ("qwen3", "think")],
    "reasoning_fields": [("both", "both"), ("reasoning", "reasoning")],
    "device": [("cpu", "cpu"), ("Neuron", "neuron")],
    "dtype": [("bf16", "bfloat16"), ("FP32", "float32")],
    "quantize": [("int8", "int8"), ("INT4", "int4")],
    "kv_cache_dtype": [("u8", "u8"), ("FP8", "fp8_e4m3fn")],
    "model_cache": [("/data", "/data"), ("~/cache", os.path.expanduser("~/cache"))],
    "max_input_tokens": [("70", 70), ("90", 90)],
    "max_total_tokens": [("700", 700), ("900", 900)],
    "max_batch_total_tokens": [("7000", 7000), ("9000", 9000)],
    "queue_threshold_ms": [("120", 120), ("0", 0)],
    "response_store_size": [("7", 7), ("0", 0)],
    "prefill_buckets": [("7", (7,)), ("9, 8,9", (8, 9))],
    "generation_config": [("auto", "auto"), ("vllm", "none")],
    "served_model_name": [("mine", "mine"), ("a/b", "a/b")],
    "lora_adapters": [
        ("someone/adapter@v2, own=/tmp", ("someone/adapter=someone/adapter@v2", "own=/tmp")),
        ("b=c/d", ("b=c/d",)),
    ],
    "max_lora_rank": [("64", 64), ("8", 8)],
    "max_cpu_loras": [("7", 7), ("1", 1)],
    "max_lora_memory": [("0.5", 0.5), ("2", 2.0)],
    "max_snapshot_memory": [("0.5", 0.5), ("0", 0.0)],
    "lora_folder": [("/tmp", "/tmp"), ("~/adapters", os.path.expanduser("~/adapters"))],
    "merge_lora": [("someone/adapter@v2", "someone/adapter=someone/adapter@v2"), ("mine=/tmp", "mine=/tmp")],
    "position_buckets": [("7", (7,)), ("9,8", (8, 9))],
    "prefill_chunk": [("0", 0), ("64", 64)],
    "sampling": [("host", "host"), ("device", "device")],
    "neuron_config": [
        ("on_device_embedding=true", ("on_device_embedding=true",)),
        ("shard_over_sequence=true, collectives_layout=BSH", ("collectives_layout=BSH", "shard_over_sequence=true")),
    ],
    "otlp_endpoint": [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
    "profile": [("/data", "/data"), ("~/profile", os.path.expanduser("~/profile"))],
    "max_waiting_tokens": [("0", 0), ("7", 7)],
    "waiting_served_ratio": [("0.3", 0.3), ("0", 0.0)],
    "hostname": [("127.0.0.1", "127.0.0.1"), ("::1", "::1")],
    "port": [("7000", 7000), ("9000", 9000)],
    "api_key": [("secret", "secret"), ("Other", "Other")],
    "root_path": [("/serve", "/serve"), ("/a/b.c/", "/a/b.c")],
    "health_route": [("/healthz", "/healthz"), ("/v1/endpoints/1/models/2", "/v1/endpoints/1/models/2")],
    "predict_route": [("/predict", "/predict"), ("/v1/endpoints/1:predict", "/v1/endpoints/1:predict")],
    "api_key_file": [(str(path), str(path)) for path in KEY_FILES],
    "cors_allow_origin": [("https://a.example", ("https://a.example",)), ("http://b.example:80", ("http://b.example:80",))],
    "allowed_media_domains": [
        ("upload.wikimedia.org, 10.0.0.5:09000 A.example", ("upload.wikimedia.org", "10.0.0.5:9000", "a.example")),
        ("::1,[0::1]:80,xn--bcher-kva.example:443", ("[::1]", "[::1]:80", "xn--bcher-kva.example:443")),
    ],
    "log_level": [("debug", "debug"), ("WARNING", "warn")],
}
KINDS = {"int": COUNTS, "int | None": COUNTS, "float": SECONDS, "float | None": SECONDS, "bool": SWITCH}
VALUES |= {entry.name: KINDS[entry.type] for entry in SETTINGS.values() if entry.name not in VALUES}
OTHER_SERVERS = json.loads((HERE / "compatibility_aliases.json").read_text())
SAME_AS = {flag: [] for flag in SETTINGS}  # names of other servers
for names, flag_and_variable in OTHER_SERVERS["same_as"].items():
    SAME_AS[flag_and_variable.split()[0]] += [name.partition("=")[0] for name in names.split()]
every_setting = pytest.mark.parametrize(("flag", "entry"), SETTINGS.items(), ids=SETTINGS)


def refusal(*argv: str, **environ: str) -> str:
    """The one line that `argv` and `environ` are refused with."""
    with pytest.raises(ConfigError) as refused:
        parse(argv, HUB_MODEL | environ)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message


def of(*argv: str, **environ: str) -> Config:
    return parse(argv, HUB_MODEL | environ)


@pytest.fixture
def model(tmp_path):
    """A folder that says that it holds a model."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


# Where a value comes from


@every_setting
def test_every_setting_has_a_flag_and_variables_which_change_nothing_else(flag, entry):
    others = {} if entry.name == "model_id" else HUB_MODEL
    for written, meant in VALUES[entry.name]:
        starts = [([], {name: written}) for name in entry.metadata["names"]]
        for name in (flag, *entry.metadata["flags"], *SAME_AS[flag]):
            starts += [([name, written], {}), ([f"{name}={written}"], {})] if name.startswith("-") else [([], {name: written})]
        for argv, environ in starts:
            assert parse(argv, others | environ) == dataclasses.replace(of(), **{entry.name: meant})


@every_setting
def test_a_flag_beats_the_environment_which_beats_the_default(flag, entry):
    (first, meant_first), (second, meant_second) = VALUES[entry.name]
    for name in entry.metadata["names"]:
        assert getattr(of(flag, first, **{name: second}), entry.name) == meant_first
        assert getattr(of(flag, second, **{name: first}), entry.name) == meant_second
    assert meant_first != meant_second or entry.name == "reasoning_parser"  # which has one value


def test_no_two_settings_share_a_name():
    names = [name for entry in SETTINGS.values() for name in (*entry.metadata["names"], *entry.metadata["flags"])]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("winner", "loser", "name"),
    [
        ("MODEL_ID", "HF_MODEL_ID", "model_id"),
        ("MAX_BATCH_SIZE", "HF_BATCH_SIZE", "max_batch_size"),
        ("MAX_TOTAL_TOKENS", "HF_SEQUENCE_LENGTH", "max_total_tokens"),
        ("DTYPE", "HF_AUTO_CAST_TYPE", "dtype"),
        ("SAGEMAKER_BIND_TO_PORT", "PORT", "port"),
        ("AIP_HTTP_PORT", "PORT", "port"),
    ],
)
def test_the_names_of_older_servers_work_and_give_way_to_the_current_ones(winner, loser, name):
    (written, meant), (other, _) = VALUES[name]
    assert getattr(of(**{winner: "", loser: written}), name) == meant
    assert getattr(of(**{winner: written, loser: other}), name) == meant


def test_the_older_name_of_max_input_tokens_works_but_not_beside_the_current_one():
    assert of(MAX_INPUT_LENGTH="70").max_input_tokens == of("--max-input-length", "70").max_input_tokens == 70
    assert "MAX_INPUT_LENGTH are both set" in refusal(MAX_INPUT_TOKENS="70", MAX_INPUT_LENGTH="80")
    assert "--max-input-tokens is given twice" in refusal("--max-input-tokens", "70", "--max-input-length", "80")


def test_without_any_setting_the_demonstration_model_is_served_with_the_defaults():
    got = parse([], {"PATH": "/bin", "HOME": "/root"})
    assert got == Config()
    assert (got.is_demo, got.is_local, got.model_name) == (True, True, "neuron-textgen/demo")
    assert got.quantize is of("--quantize", "none").quantize is None


def test_the_model_that_sagemaker_unpacks_is_served_when_none_is_named(model, monkeypatch):
    monkeypatch.setattr(config, "SAGEMAKER_MODEL", model)
    assert parse([], {}).model_id == str(model)
    assert parse([], {"HF_MODEL_ID": "someone/model"}).model_id == "someone/model"
    (model / "config.json").unlink()
    assert parse([], {}).is_demo


def test_a_model_of_sagemaker_that_cannot_be_looked_at_is_refused_only_when_no_other_is_named(monkeypatch):
    path = Path("/" + "a" * 256)
    monkeypatch.setattr(config, "SAGEMAKER_MODEL", path)
    assert of().model_id == "someone/model"
    assert refusal(MODEL_ID="") == f"--model-id {path} cannot be read: File name too long"


@pytest.mark.parametrize("given", [".", "./", "{name}", "./{name}", "../{parent}/{name}", "~/{name}", "tiny model.gguf"])
def test_a_local_model_is_found_from_every_working_folder_and_named_as_it_was_given(model, monkeypatch, given):
    (model.parent / "tiny model.gguf").touch()
    monkeypatch.setenv("HOME", str(model.parent))
    monkeypatch.chdir(model if given in (".", "./") else model.parent)
    given = given.format(name=model.name, parent=model.parent.name)
    found = of("--model-id", given)
    assert os.path.isabs(found.model_id)
    monkeypatch.chdir("/")
    assert os.path.samefile(found.model_id, model.parent / given if given.endswith("gguf") else model)
    assert found.model_name == given


def test_a_local_model_is_read_where_a_name_of_the_hub_would_do_too(model, monkeypatch):
    monkeypatch.chdir(model.parent.parent)
    name = f"{model.parent.name}/{model.name}"
    assert of("--model-id", name).model_id == str(model)
    monkeypatch.chdir("/")
    assert of("--model-id", name).model_id == name


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_variable_counts_as_unset(empty):
    names = {name for entry in SETTINGS.values() for name in entry.metadata["names"]} - (
        {"API_KEY", "API_KEY_FILE"} if empty else set()
    )
    assert parse([], dict.fromkeys([*names, "NUM_SHARD", "LORA_ADAPTERS"], empty)) == Config()


def test_space_around_a_value_of_the_environment_does_not_matter():
    assert of(DEVICE=" cpu\n", PORT=" 9000 ") == of(DEVICE="cpu", PORT="9000")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("[]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('{"a":' * 100_000, "must be a JSON object"),
    ],
    ids=["list", "truncated", "nested too deeply"],
)
@pytest.mark.parametrize("flag", ["--mm-processor-kwargs", "--chat-template-kwargs"])
def test_fields_of_preprocessing_and_variables_of_templates_are_a_json_object(flag, given, why):
    line = refusal(flag, given)
    assert line.startswith(f"{flag} {given!r}: {why}")


def test_a_hostname_variable_that_is_not_an_address_is_ignored_and_a_flag_must_be_one():
    for name in ("ip-10-0-0-1.ec2.internal", "a1b2c3d4e5f6", "localhost", "0.0.0.0.0"):
        assert of(HOSTNAME=name).hostname == "0.0.0.0"
    assert "myhost" in refusal("--hostname", "myhost")
    assert of("--hostname", "localhost").hostname == "127.0.0.1"


def test_origins_and_options_of_the_library_may_be_given_in_a_list_and_by_repeating_the_flag():
    both = ("https://a.example", "https://b.example")
    assert of("--cors-allow-origin", ",".join(both)).cors_allow_origin == both
    assert of("--cors-allow-origin", "https://a.example/", "--cors-allow-origin=https://b.example").cors_allow_origin == both
    assert "'a.example' is not an origin" in refusal(CORS_ALLOW_ORIGIN="a.example")
    options = ("on_device_embedding=true", "sequence_parallel_norm_threshold=512")
    assert of(NEURON_CONFIG=", ".join(options)).neuron_config == options
    assert of("--neuron-config", options[1], "--neuron-config", options[0]).neuron_config == options


def test_several_media_domains_are_given_as_for_vllm():
    several = of("--allowed-media-domains", "a.example", "b.example", "--port", "80")
    assert (several.allowed_media_domains, several.port) == (("a.example", "b.example"), 80)
    assert Config.from_json(several.to_json()) == several


def test_the_largest_body_follows_from_the_model_unless_it_is_set():
    assert (of().body_limit(reads_images=False), of().body_limit(reads_images=True)) == (2_000_000, 32_000_000)
    for reads_images in (True, False):
        assert of(PAYLOAD_LIMIT="5000").body_limit(reads_images) == 5000


def test_a_switch_needs_no_value_and_takes_the_usual_words():
    assert of("--json-output", "--port", "9000") == of("--json-output", "true", "--port=9000")
    for words, meant in ((("1", "yes", "TRUE"), True), (("0", "no", "False"), False)):
        for word in words:
            assert of(JSON_OUTPUT=word).json_output is of(f"--json-output={word}").json_output is meant


def test_short_flags_are_those_of_tgi():
    assert of("-p", "9000", "-g", "5") == of("--port", "9000", "--graceful-termination-timeout", "5")
    assert "--port is given twice" in refusal("-p", "9000", "--port", "9000")


# What is refused, and in which words


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("--max-batchsize", "--max-batch-size"),
        ("--max_total_tokens", "--max-total-tokens"),
        ("--model", "--model-id"),
        ("--prot=8080", "--port"),
        ("--api-kee=secret", "--api-key"),
    ],
)
def test_an_unknown_flag_names_the_nearest_and_hides_its_value(typed, nearest):
    flag = typed.split("=")[0]
    assert refusal(typed, "5") == f"unknown argument {flag!r}; did you mean {nearest}? (--help lists the settings)"


@pytest.mark.parametrize("typed", ["serve", "8080", "--zzzzzzzz", "-", "--", "", "a\nb"])
def test_what_resembles_no_flag_is_refused_without_a_guess(typed):
    assert refusal(typed) == f"unknown argument {typed!r} (--help lists the settings)"


@every_setting
def test_a_value_that_is_missing_empty_or_given_twice_is_refused(flag, entry):
    value = VALUES[entry.name][0][0]
    assert refusal(f"{flag}=") == f"{flag} needs a value"
    if flag not in config.REPEATABLE:
        assert refusal(flag, value, f"{flag}={value}") == f"{flag} is given twice"
    if entry.type != "bool":
        assert refusal(flag, "") == refusal(f"{flag}=--") == f"{flag} needs a value"
        for argv in ([flag], [flag, "--json-output"]):
            least = "at least one" if flag in config.REPEATABLE else "one"
            assert flag in refusal(*argv) and f"expected {least} argument" in refusal(*argv)


WHOLE_NUMBERS = dict.fromkeys(("many", "2.5", "1e3", "0x10", "5 GB"), "must be a whole number")
COUNT = WHOLE_NUMBERS | dict.fromkeys(("0", "-1"), "must be at least 1") | {"9" * 30: "must be between 1 and 1000000000"}
POSITIVE = dict.fromkeys(("soon", "5s", "0", "-1", "inf", "nan", "1e999", "1e20"), "must be a positive number, at most 1000000")
BY_KIND = {"int": COUNT, "int | None": COUNT, "float": POSITIVE, "float | None": POSITIVE}
BY_KIND["bool"] = {"maybe": "must be one of true, false"}
NO_HOSTS = ("*", "*.a.example", "https://a.example", "a.example/", "user@a.example", "bücher.example", "a..b", "-a.example")
NO_HOSTS += ("127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "a.example:0", "a.example:65536", "a.example:")
WRONG = {entry.name: BY_KIND[entry.type] for entry in SETTINGS.values() if entry.type in BY_KIND}
WRONG |= {
    "max_total_tokens": WHOLE_NUMBERS | dict.fromkeys(("1", "0", "-1"), "must be at least 2"),
    "max_batch_total_tokens": WHOLE_NUMBERS | dict.fromkeys(("1", "0", "-1"), "must be at least 2"),
    "queue_threshold_ms": WHOLE_NUMBERS | {"-1": "must be at least 0"},
    "port": WHOLE_NUMBERS | dict.fromkeys(("0", "65536", "-1"), "must be between 1 and 65535"),
    "max_top_n_tokens": WHOLE_NUMBERS | dict.fromkeys(("0", "-1", "10001"), "must be between 1 and 10000"),
    "waiting_served_ratio": dict.fromkeys(("often", "-1", "inf", "nan", "1e20"), "must be a number between 0 and 1000000"),
    "max_snapshot_memory": dict.fromkeys(("often", "-1", "inf", "nan", "1e20"), "must be a number between 0 and 1000000"),
    "prefill_chunk": WHOLE_NUMBERS | {"-1": "must be at least 0", "1": "must be 0 (off) or at least 3"},
    "prefill_buckets": {"128,": "must be a whole number", "0,1": "must be at least 1"},
    "tokenizer_config_path": dict.fromkeys(("/nowhere", "~nobody-here/a.json", "/" + "a" * 256), "there is no such file"),
    "api_key_file": {
        "/nowhere": "cannot be read: No such file or directory",
        os.devnull: "has no key in it",
        __file__: "must be printable ASCII characters without spaces",
    },
    "root_path": dict.fromkeys(
        ("serve", "/a//b", "/a b", "http://host/serve", "/a?b"),
        "must be a path such as /serve, of letters, digits and the characters . _ ~ -",
    ),
    "health_route": dict.fromkeys(("health", "/a<b"), "must begin with a slash, and have no <"),
    "predict_route": {"http://host/predict": "must begin with a slash, and have no <"},
    "device": {"tpu": "must be one of auto, cpu, cuda, neuron"},
    "dtype": {"int3": "must be one of auto, float32, bfloat16, float16"},
    "kv_cache_dtype": {
        "int4": "must be one of auto, float32, bfloat16, u8, fp8_e4m3fn",
        "fp8_e5m2": "not supported; give fp8_e4m3fn, which has less than a third of the error (KL divergence 0.0086 instead "
        "of 0.0303)",
        "int8": "not supported; give u8 on CPUs and fp8_e4m3fn on Neuron, where int8 has no scales (KL divergence 1.4 or more "
        "instead of 0.0086)",
    },
    "quantize": dict.fromkeys(("int2", "bitsandbytes-int8", "awq_marlin"), "must be one of none, int8, int4"),
    **dict.fromkeys(
        ("max_waiting_tokens", "speculate", "response_store_size", "prof_waitstep", "prof_warmupstep", "prof_step"),
        WHOLE_NUMBERS | {"-1": "must be at least 0"},
    ),
    "neuron_config": {
        "fuse_mlp=true": "'fuse_mlp' is not an option; supported: collectives_layout, on_device_embedding, "
        "sequence_parallel_norm, sequence_parallel_norm_threshold, shard_over_sequence, weight_tiling",
        "collectives_layout=SBH": "collectives_layout must be BSH, or left out",
        "on_device_embedding": "on_device_embedding must be true, or left out",
        "sequence_parallel_norm_threshold=0": "sequence_parallel_norm_threshold must be a positive whole number",
        "shard_over_sequence=true,shard_over_sequence=false": "shard_over_sequence must be true, or left out",
    },
    "otlp_endpoint": {
        "localhost:4318": "must be the URL of a collector, such as http://localhost:4318",
        "http://": "must be the URL of a collector, such as http://localhost:4318",
        "http://host:4317": "port 4317 is for OTLP over gRPC; traces are sent over HTTP, for which collectors use port 4318",
    },
    "allowed_media_domains": {
        value: f"{value!r} is not a host; one looks like upload.wikimedia.org or 10.0.0.5:9000" for value in NO_HOSTS
    },
    "log_level": dict.fromkeys(("loud", "text_generation_router=loud", ","), "must be one of error, warn, info, debug"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_its_name_and_what_it_must_be(name):
    flag = "--" + name.replace("_", "-")
    for value, words in WRONG[name].items():
        assert refusal(f"{flag}={value}") == f"{flag} {value!r}: {words}"
        for variable in SETTINGS[flag].metadata["names"]:
            assert refusal(**{variable: value}) == f"{variable} {value!r}: {words}"
        for other in SAME_AS[flag]:
            argv, environ = ([f"{other}={value}"], {}) if other.startswith("-") else ([], {other: value})
            assert refusal(*argv, **environ) == f"{other} {value!r}: {words}"


@pytest.mark.parametrize("flag", SETTINGS)
def test_no_setting_takes_control_characters_or_bytes_that_are_no_text(flag):
    for value in ("a\r\nX: 1", "a\tb", "1\x7f2", "a\x9bb", "/a\udcff"):
        shown = "" if flag == "--api-key" else f" {value!r}"
        assert refusal(flag, value) == f"{flag}{shown}: must be UTF-8 without control characters"


def test_an_api_key_is_stripped_and_checked_and_never_shown():
    assert of(API_KEY=" s3cret\n").api_key == "s3cret"
    for wrong in ("two words", "schlüssel"):
        assert refusal(API_KEY=wrong) == "API_KEY: must be printable ASCII characters without spaces"
    for blank in (" ", "\n"):
        for name in ("API_KEY", "VLLM_API_KEY", "API_KEY_FILE"):
            assert refusal(**{name: blank}) == f"{name} is only spaces: give a key, or leave it empty for a server without one"


@pytest.mark.parametrize("longest_input", ["100", "101", "5000"])
def test_a_window_without_room_for_an_answer_is_refused(longest_input):
    message = refusal("--max-input-tokens", longest_input, MAX_TOTAL_TOKENS="100")
    assert f"`max_input_tokens`({longest_input}) must be < `max_total_tokens`(100)" in message
    for name in ("--max-input-tokens", "MAX_INPUT_TOKENS", "--max-total-tokens", "MAX_TOTAL_TOKENS"):
        assert name in message
    assert of("--max-input-tokens", "99", MAX_TOTAL_TOKENS="100").max_input_tokens == 99


# The names of other servers

LAUNCHER = """model-id revision validation-workers sharded num-shard quantize speculate dtype kv-cache-dtype trust-remote-code
max-concurrent-requests max-best-of max-stop-sequences max-top-n-tokens max-input-tokens max-input-length max-total-tokens
waiting-served-ratio max-batch-prefill-tokens max-batch-total-tokens max-waiting-tokens max-batch-size cuda-graphs hostname port
prometheus-port shard-uds-path master-addr master-port huggingface-hub-cache weights-cache-override disable-custom-kernels
cuda-memory-fraction rope-scaling rope-factor json-output otlp-endpoint otlp-service-name cors-allow-origin api-key
watermark-gamma watermark-delta ngrok ngrok-authtoken ngrok-edge tokenizer-config-path disable-grammar-support
max-client-batch-size lora-adapters usage-stats payload-limit enable-prefill-logprobs graceful-termination-timeout"""


def test_every_flag_of_tgis_launcher_and_its_variable_are_known():
    known = {name.partition("=")[0] for table in OTHER_SERVERS.values() for names in table for name in names.split()}
    known |= {name for flag, e in SETTINGS.items() for name in (flag, *e.metadata["flags"], *e.metadata["names"])}
    flags = {f"--{name}" for name in LAUNCHER.split()}
    assert flags | {flag[2:].upper().replace("-", "_") for flag in flags} <= known


def test_a_download_needs_no_package_that_the_images_of_tgi_ask_for(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "python").chmod(0o755)
    environ = CLEAN | {"PYTHON": str(tmp_path / "python"), "HF_HUB_ENABLE_HF_TRANSFER": "1"}
    done = subprocess.run([HERE / "entrypoint.sh", "compile"], env=environ, capture_output=True, text=True)
    assert "PYTHON=" in done.stdout and "HF_HUB_ENABLE_HF_TRANSFER" not in done.stdout


def test_a_setting_of_another_server_that_clients_do_not_see_is_accepted_with_one_line():
    environ = {"CUDA_GRAPHS": "1,2", "TS_ANYTHING": "1", "BATCH_BUCKET_SIZE": "8", "OTLP_SERVICE_NAME": "llm"}
    flags = {
        "--validation-workers": ["2"],
        "--sharded": ["true"],
        "--disable-custom-kernels": [],
        "--compute-type": ["inf2"],
        "--env": [],
        "--ncs": [],
    }
    done = run(*(word for flag, value in flags.items() for word in (flag, *value)), **HUB_MODEL, **environ)
    assert Config.from_json(done.stdout) == of()
    lines = [line.split(" WARNING config: ")[1] for line in done.stderr.splitlines()[1:]]
    assert {line.split(" has no effect: ")[0] for line in lines} == {*flags, *environ}
    assert len(lines) == len(flags) + len(environ)


@pytest.mark.parametrize(
    ("set_", "instead"),
    [
        ("--ngrok", "tunnel"),
        ("--models a=b.mar c=d.mar", "--model-id"),
        ("ROPE_FACTOR=2.0", "rope_scaling"),
        ("QUANT_CONFIG=/maxabs.json", "--quantize"),
        ("--quantization fp8", "--quantize (QUANTIZE); int8 takes the memory of fp8, with a fifth of its error"),
        ("TS_MODEL_STORE=/models", "--model-id"),
        ("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN=true", "ignore_eos"),
    ],
)
def test_a_setting_of_another_server_that_clients_would_miss_is_refused_with_what_to_use(set_, instead):
    argv, environ = (set_.split(), {}) if set_.startswith("-") else ([], dict([set_.split("=")]))
    message = refusal(*argv, **environ)
    assert f"{set_.split('=')[0].split()[0]} is not supported: " in message
    assert instead in message


def test_a_setting_of_another_server_may_have_the_value_that_asks_for_nothing():
    environ = {"SM_NUM_GPUS": "1", "NGROK": "False", "KV_CACHE_DTYPE": "auto", "HF_TASK": "text-generation"}
    done = run("--num-shard", "1", "--tensor-parallel-size=1", "--rope-factor", "1.0", **HUB_MODEL, **environ)
    assert Config.from_json(done.stdout) == of()
    assert done.stderr.count("\n") == 1


def test_the_name_of_another_server_is_logged_with_the_setting_that_it_means_and_hides_its_value():
    done = run("--max-num-seqs", "7", **HUB_MODEL, NUM_SHARD="2", VLLM_API_KEY="secret")
    assert Config.from_json(done.stdout) == of("--max-batch-size", "7", "--tp-degree", "2", "--api-key", "secret")
    lines = {line.split(" WARNING config: ")[1] for line in done.stderr.splitlines()[1:]}
    assert lines == {
        "--max-num-seqs is read as --max-batch-size (MAX_BATCH_SIZE)",
        "NUM_SHARD is read as --tp-degree (TP_DEGREE)",
        "VLLM_API_KEY is read as --api-key (API_KEY)",
    }


def test_of_several_names_of_a_setting_flags_beat_variables_and_its_own_name_the_others():
    assert of("--tp-degree", "4", "--num-shard", "2", NUM_SHARD="8").tp_degree == 4
    assert of("--num-shard", "2", TP_DEGREE="4").tp_degree == 2
    assert of(HF_NUM_CORES="4", SM_NUM_GPUS="2").tp_degree == 4
    assert of("--num-shard", "1", HF_NUM_CORES="4").tp_degree == 4
    assert of("--num-shard", "1").tp_degree is None and of("--tp-degree", "1").tp_degree == 1


def test_each_name_of_another_server_that_does_not_count_is_logged_with_the_one_that_does():
    done = run("--num-shard", "2", **HUB_MODEL, NUM_SHARD="8", SM_NUM_GPUS="4", HF_OPTIMUM_BATCH_SIZE="3", TS_BATCH_SIZE="5")
    assert Config.from_json(done.stdout) == of("--tp-degree", "2", "--max-batch-size", "3")
    assert {line.split(" WARNING config: ")[1] for line in done.stderr.splitlines()[1:]} == {
        "--num-shard is read as --tp-degree (TP_DEGREE)",
        "NUM_SHARD is ignored: --num-shard is set",
        "SM_NUM_GPUS is ignored: --num-shard is set",
        "HF_OPTIMUM_BATCH_SIZE is read as --max-batch-size (MAX_BATCH_SIZE)",
        "TS_BATCH_SIZE is ignored: HF_OPTIMUM_BATCH_SIZE is set",
    }


def test_a_flag_of_another_server_cannot_have_two_values():
    assert refusal("--num-shard", "2", "--num-shard", "4") == "--num-shard '2,4': must be a whole number"


def test_the_names_of_other_servers_are_no_settings():
    ours = {name for flag, e in SETTINGS.items() for name in (flag, *e.metadata["flags"], *e.metadata["names"])}
    assert not ours & set(COMPATIBILITY_ALIASES)


# Which model


def test_a_hub_id_is_not_looked_for_on_this_machine():
    assert not of("--model-id", "someone/model").is_local
    assert not of("--model-id", "gpt2").is_local
    assert of().model_name == "someone/model"


@pytest.mark.parametrize("written", ["/no/such/folder", "./nowhere", "../nowhere", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_refused_as_a_path(monkeypatch, tmp_path, written):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    message = refusal("--model-id", written)
    assert message.startswith("--model-id ")
    assert message.endswith("there is no such folder")


def test_a_model_that_cannot_be_looked_at_is_refused_with_the_reason():
    path = "/" + "a" * 256
    assert refusal("--model-id", path) == f"--model-id {path} cannot be read: File name too long"


def test_a_url_of_a_model_is_refused_as_one():
    given = "https://huggingface.co/someone/model"
    assert refusal("--model-id", given).endswith("must be a hub id (owner/name), a folder or a GGUF file, not a URL")


def test_a_folder_is_checked_for_a_model_and_beats_a_hub_id_of_the_same_name(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "it has no config.json" in refusal("--model-id", str(tmp_path / "empty"))
    assert of("--model-id", str(model)).model_name == str(tmp_path)
    monkeypatch.chdir(model.parent)
    assert of("--model-id", model.name).is_local


# The file between the processes


@pytest.mark.parametrize("argv", [[], [f"{flag}={VALUES[entry.name][0][0]}" for flag, entry in SETTINGS.items()]])
def test_a_run_reads_back_what_was_resolved_for_it(argv, tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", str(tmp_path))
    (tmp_path / "config.json").write_text(of(*argv).to_json())
    assert config.resolved() == of(*argv)
    assert socket_address() == f"ipc://{tmp_path}/worker.sock"


def test_a_path_below_a_working_folder_that_is_not_utf_8_is_read_back():
    written = Config(model_cache="/a\udcff/cache")
    assert Config.from_json(written.to_json()) == written


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        of().port = 1


# What the model says of itself


@pytest.mark.parametrize(
    ("argv", "window", "total", "longest_input"),
    [
        ([], 1024, 1024, 1023),
        ([], 131_072, DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS - 1),
        ([], None, DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS - 1),
        (["--max-total-tokens", "4096"], 4096, 4096, 4095),
        (["--max-total-tokens", "100"], None, 100, 99),
        (["--max-input-tokens", "1023"], 1024, 1024, 1023),
        (["--max-total-tokens", "100", "--max-input-tokens", "50"], 4096, 100, 50),
    ],
)
def test_what_is_left_open_is_taken_from_the_model(argv, window, total, longest_input):
    got = of(*argv).with_manifest(Manifest("llama", window, ()))
    assert (got.max_total_tokens, got.max_input_tokens, got.max_batch_size) == (total, longest_input, DEFAULT_BATCH_SIZE)
    assert dataclasses.replace(got, max_total_tokens=None, max_input_tokens=None, max_batch_size=None) == of()


@pytest.mark.parametrize(
    ("given", "name", "source"),
    [
        ("someone/adapter@v2", "someone/adapter", "someone/adapter@v2"),
        ("mine=/tmp", "mine", "/tmp"),
        ("someone/adapter", "someone/adapter", "someone/adapter"),
        ("mine=someone/adapter@v2", "mine", "someone/adapter@v2"),
        ("/tmp", "/tmp", "/tmp"),
    ],
)
def test_an_adapter_has_the_name_that_requests_use(given, name, source):
    assert of("--lora-adapters", given).adapters == {name: source}
    assert of("--merge-lora", given).merged_adapter == name


def test_several_adapters_are_served_and_one_is_merged():
    assert list(of("--lora-adapters", "a/b", "c/d,mine=/tmp").adapters) == ["a/b", "c/d", "mine"]
    assert list(of("--lora-modules", "a=/tmp", "b=c/d").adapters) == ["a", "b"]
    assert "2 adapters are given, and one can be merged; --lora-adapters serves several" in refusal("--merge-lora", "a/b,c/d")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("a=/nowhere", "there is no folder /nowhere"),
        ("/nowhere", "there is no folder /nowhere"),
        ("nothing", "there is no folder nothing"),
        ("=b/c", "must have a name before the =: =b/c"),
        ("a=b/c,a=d/e", "two adapters have the name a; give one of them another, as name=folder"),
        ('{"name": "a", "path": "b/c"}', "must be name=folder, name=owner/adapter or owner/adapter, not JSON"),
        ("ours=b/c", "ours is a name that requests have for the model; give the adapter another one, as name=folder"),
        ("tgi=b/c", "tgi is a name that requests have for the model"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(given, reason):
    assert reason in refusal("--lora-adapters", given, "--served-model-name", "ours")


GIB = 1 << 30
# 16 layers of 8 heads of keys and of values, of 64 numbers in float32: 64 KiB a token.
SHAPE = {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048}
DYNAMIC = {"rope_type": "dynamic", "original_max_position_embeddings": 2048}
LONGROPE = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("argv", "facts", "memory", "total"),
    [
        ([], SHAPE, 64 * GIB, 65_536),
        ([], SHAPE, 63 * GIB, 32_768),
        ([], SHAPE, 1024 * GIB, 131_072),  # what the model has
        ([], SHAPE, GIB, DEFAULT_MAX_TOTAL_TOKENS),
        (["--max-batch-size", "16"], SHAPE, 64 * GIB, 16_384),
        (["--max-batch-total-tokens", "40000"], SHAPE, 64 * GIB, 8192),
        (["--max-total-tokens", "3000"], SHAPE, 64 * GIB, 3000),
        ([], SHAPE | LONGROPE, 64 * GIB, 4096),
        ([], SHAPE | LONGROPE | {"rope_scaling": {"type": "su", "original_max_position_embeddings": None}}, 64 * GIB, 4096),
        ([], SHAPE | {"rope_parameters": {"full_attention": {}, "sliding_attention": DYNAMIC}}, 64 * GIB, 2048),
        ([], SHAPE | {"attention_chunk_size": 8192}, 64 * GIB, 8192),
        ([], {"text_config": SHAPE}, 64 * GIB, 65_536),
        ([], {}, 64 * GIB, DEFAULT_MAX_TOTAL_TOKENS),
        ([], SHAPE, None, DEFAULT_MAX_TOTAL_TOKENS),
        (["--kv-cache-dtype", "u8"], SHAPE, 64 * GIB, 131_072),
    ],
)
def test_the_context_length_is_the_models_where_a_quarter_of_the_memory_holds_it_in_all_slots(argv, facts, memory, total):
    manifest = Manifest("llama", 131_072, (), config_json=facts)
    assert of(*argv).with_manifest(manifest, memory).max_total_tokens == total


@pytest.mark.parametrize(
    ("argv", "memory", "slots"),
    [
        ([], 64 * GIB, 32),
        (["--kv-cache-dtype", "u8"], 16 * GIB, 26),
        ([], 1024 * GIB, MAX_DEFAULT_PREFIX_SLOTS),
        ([], GIB, 4),  # at least those that run
        ([], None, 4),
        (["--max-batch-size", "50"], 64 * GIB, 50),
        (["--prefix-slots", "7"], 64 * GIB, 7),
        (["--prefix-reuse", "false"], 64 * GIB, 4),
        (["--max-batch-total-tokens", "50000"], 64 * GIB, 6),
    ],
)
def test_there_are_as_many_slots_for_prefixes_as_fit_into_a_quarter_of_the_memory(argv, memory, slots):
    manifest = Manifest("llama", 131_072, (), config_json=SHAPE)
    config = of("--max-total-tokens", "8192", *argv).with_manifest(manifest, memory)
    assert config.with_prefix_slots(manifest, memory).prefix_slots == slots


def test_fewer_slots_for_prefixes_than_run_at_a_time_and_slots_without_prefix_caching_are_refused():
    manifest = Manifest("llama", 131_072, (), config_json=SHAPE)
    with pytest.raises(ConfigError, match=r"^--prefix-slots 2 \(PREFIX_SLOTS\) is less than the 4 requests that run"):
        of("--prefix-slots", "2").with_manifest(manifest).with_prefix_slots(manifest, None)
    with pytest.raises(ConfigError, match=r"^--prefix-slots 9 \(PREFIX_SLOTS\) needs prefix caching"):
        of("--prefix-slots", "9", "--prefix-reuse", "false").with_manifest(manifest).with_prefix_slots(manifest, None)


@pytest.mark.parametrize(
    ("slots", "window", "tokens", "served"),
    [
        (None, 1024, 4095, 3),
        (None, 1024, 65536, DEFAULT_BATCH_SIZE),
        (None, 1024, 1024, 1),
        (8, 1024, 8192, 8),
        (8, 1024, 2048, 2),
    ],
)
def test_max_batch_total_tokens_is_a_limit_of_the_slots(slots, window, tokens, served):
    given = Config(model_id="someone/model", max_batch_size=slots, max_batch_total_tokens=tokens)
    assert given.with_manifest(Manifest("llama", window, ())).max_batch_size == served


def test_max_batch_total_tokens_without_room_for_one_slot_is_refused_with_both_numbers():
    line = refusal("--max-batch-total-tokens", "4095", MAX_TOTAL_TOKENS="4096")
    rule = "raise it, or lower --max-total-tokens (MAX_TOTAL_TOKENS)"
    assert line == f"--max-batch-total-tokens 4095 (MAX_BATCH_TOTAL_TOKENS) is less than one slot of 4096 tokens: {rule}"
    with pytest.raises(ConfigError, match=r"MAX_BATCH_TOTAL_TOKENS\) is less than one slot of 1024 tokens"):
        of(MAX_BATCH_TOTAL_TOKENS="1023").with_manifest(Manifest("llama", 1024, ()))


def test_a_window_that_the_model_does_not_have_is_refused_with_both_numbers():
    with pytest.raises(ConfigError) as refused:
        of("--max-total-tokens", "4097").with_manifest(Manifest("llama", 4096, ()))
    rule = "exceeds the context length of someone/model; give at most 4096"
    assert str(refused.value) == f"--max-total-tokens 4097 (MAX_TOTAL_TOKENS) {rule}"


@pytest.mark.parametrize(("window", "total"), [(1024, 1024), (131_072, DEFAULT_MAX_TOTAL_TOKENS)])
def test_a_prompt_that_does_not_fit_the_models_window_is_refused_with_both_numbers(window, total):
    with pytest.raises(ConfigError, match=rf"`max_input_tokens`\({total}\) must be < `max_total_tokens`\({total}\)"):
        of("--max-input-tokens", str(total)).with_manifest(Manifest("llama", window, ()))


# What people read


def test_the_help_names_every_setting_its_variables_its_meaning_and_its_default():
    shown = run("--port", "http", "--help", COLUMNS="80")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80
    words = "".join(shown.stdout.split())
    for flag, entry in SETTINGS.items():
        text = f"{entry.metadata['help']} Default: {entry.metadata['shown']}. [{', '.join(entry.metadata['names'])}]"
        assert flag in words
        assert "".join(text.split()) in words
    for default in ("Default:8080.", "Default:0.0.0.0.", "Default:false.", "Default:25.", "Default:max_total_tokens-1."):
        assert default in words
    groups = re.findall(r"^(\S.*):$", shown.stdout, flags=re.MULTILINE)
    assert groups == ["options", *SETTING_GROUPS.values()] and set(SETTING_GROUPS) < set(SETTINGS)
    assert str(DEMO_MODEL) not in words
    assert "--cuda-graphs" not in words


def test_the_version_is_printed():
    for flag in ("--version", "-V"):
        done = run("--port", "http", flag)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", f"neuron-textgen {config.VERSION}\n")
    done = subprocess.run([HERE / "entrypoint.sh", "serve", "--version"], env=CLEAN, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"neuron-textgen {config.VERSION}\n")


# As a process


CLEAN = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHON": sys.executable}


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, HERE / "config.py", *argv], env=CLEAN | environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--max-batchsize", "5"], {}),
        (["--port", "http"], {}),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], {}),
        (["--model-id", "/no/such/folder"], {}),
        ([], {"PORT": "0"}),
    ],
)
def test_what_cannot_be_served_ends_with_2_and_one_line(argv, environ):
    done = run(*argv, **HUB_MODEL | environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_what_can_be_served_is_printed_as_json(model):
    done = run("--port", "9000", MODEL_ID=str(model), MAX_BATCH_SIZE="2")
    assert done.returncode == 0
    assert Config.from_json(done.stdout) == Config(model_id=str(model), port=9000, max_batch_size=2)
    assert done.stderr.count("\n") == 1
    assert config.VERSION in done.stderr and str(model) in done.stderr


def test_log_level_says_what_is_logged():
    assert run(**HUB_MODEL, LOG_LEVEL="warning").stderr == run("--log-level", "error", **HUB_MODEL).stderr == ""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("off", "error"),
        ("TRACE", "debug"),
        ("info,text_generation_router=debug", "info"),
        ("Warn , hyper=off", "warn"),
        ("text_generation_launcher=debug,error", "debug"),
        ("text_generation_router::server=warning", "warn"),
        ("hyper=off", "error"),
    ],
)
def test_of_a_filter_that_tgis_launcher_takes_the_first_level_counts(theirs, ours):
    assert of(LOG_LEVEL=theirs).log_level == of("--log-level", theirs).log_level == ours


@pytest.mark.parametrize(
    "method",
    "awq bitsandbytes bitsandbytes-fp4 bitsandbytes-nf4 compressed-tensors eetq exl2 fp8 GPTQ marlin".split(),  # noqa: SIM905
)
def test_a_method_of_tgi_is_right_where_the_checkpoint_is_quantized(method):
    for name in ("QUANTIZE", "HF_MODEL_QUANTIZE"):
        assert of(**{name: method}).quantize == config.CHECKPOINT_QUANTIZE


@pytest.mark.parametrize("word", ["fp8_e4m3fn", "fp8_e4m3", "fp8"])
def test_names_that_tgi_and_vllm_have_for_a_kv_cache_in_fp8_mean_the_same(word):
    assert of("--kv-cache-dtype", word).kv_cache_dtype == of(KV_CACHE_DTYPE=word).kv_cache_dtype == "fp8_e4m3fn"


def test_an_address_that_cannot_be_used_is_refused_with_both_settings_that_may_be_wrong():
    with pytest.raises(ConfigError) as error:
        config.listen(Config(hostname="192.0.2.1", port=0))  # for documents (RFC 5737): no machine has it
    assert str(error.value).startswith("port 0 of 192.0.2.1 cannot be used: Cannot assign requested address; choose ")
    assert "--port (PORT)" in str(error.value) and "--hostname (HOSTNAME)" in str(error.value)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too():
    with config.listen(Config(hostname="::", port=0)) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1])).close()
    with config.listen(Config(hostname="::1", port=0)) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
