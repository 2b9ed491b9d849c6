"""Every setting is reachable, checked at boot and told in one line when wrong; a checkpoint's own files are read with care."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys

import pytest

import config
from config import DEFAULT_MAX_TOTAL_TOKENS, DEMO_MODEL, HERE, Config, ConfigError, Manifest, flag_name, parse

SETTINGS = dataclasses.fields(Config)
HUB_MODEL = {"MODEL_ID": "someone/model"}

# For each setting two different values as a person writes them, and what they mean.
VALUES = {
    "model_id": [("someone/model", "someone/model"), ("other/model", "other/model")],
    "revision": [("main", "main"), ("abc123", "abc123")],
    "huggingface_hub_cache": [("/data", "/data"), ("cache", "cache")],
    "trust_remote_code": [("true", True), ("false", False)],
    "tokenizer_config_path": [(str(HERE / "README.md"), str(HERE / "README.md")), (__file__, __file__)],
    "device": [("cpu", "cpu"), ("neuron", "neuron")],
    "dtype": [("bf16", "bfloat16"), ("FP32", "float32")],
    "quantize": [("int8", "int8"), ("INT4", "int4")],
    "model_cache": [("/data", "/data"), ("~/cache", os.path.expanduser("~/cache"))],
    "model_cache_size": [("7", 7.0), ("0.5", 0.5)],
    "threads": [("7", 7), ("9", 9)],
    "cuda_graphs": [("0", "0"), ("4,2", "4,2")],
    "num_shard": [("1", 1), ("01", 1)],
    "tp_degree": [("7", 7), ("9", 9)],
    "max_batch_size": [("7", 7), ("9", 9)],
    "max_input_tokens": [("70", 70), ("90", 90)],
    "max_total_tokens": [("700", 700), ("900", 900)],
    "prefill_buckets": [("7", (7,)), ("9, 8,9", (8, 9))],
    "position_buckets": [("7", (7,)), ("9,8", (8, 9))],
    "compile_workers": [("7", 7), ("9", 9)],
    "sampling": [("host", "host"), ("device", "device")],
    "max_concurrent_requests": [("7", 7), ("9", 9)],
    "max_queue_time": [("7", 7.0), ("0.5", 0.5)],
    "max_batch_prefill_tokens": [("7", 7), ("4096", 4096)],
    "waiting_served_ratio": [("0.3", 0.3), ("1.2", 1.2)],
    "max_waiting_tokens": [("7", 7), ("20", 20)],
    "max_client_batch_size": [("7", 7), ("9", 9)],
    "max_best_of": [("7", 7), ("9", 9)],
    "max_stop_sequences": [("7", 7), ("9", 9)],
    "max_top_n_tokens": [("7", 7), ("9", 9)],
    "hostname": [("127.0.0.1", "127.0.0.1"), ("::1", "::1")],
    "port": [("7000", 7000), ("9000", 9000)],
    "api_key": [("secret", "secret"), ("Other", "Other")],
    "cors_allow_origin": [("https://a.example", "https://a.example"), ("http://b.example:80", "http://b.example:80")],
    "web_concurrency": [("7", 7), ("9", 9)],
    "payload_limit": [("7", 7), ("9", 9)],
    "client_timeout": [("7", 7.0), ("0.5", 0.5)],
    "response_deadline": [("7", 7.0), ("0.5", 0.5)],
    "compute_type": [("inf2", "inf2"), ("cpu", "cpu")],
    "startup_timeout": [("7", 7.0), ("0.5", 0.5)],
    "stuck_timeout": [("7", 7.0), ("0.5", 0.5)],
    "graceful_termination_timeout": [("7", 7.0), ("1e1", 10.0)],
    "json_output": [("true", True), ("false", False)],
}
BY_NAME = [(entry, name) for entry in SETTINGS for name in entry.metadata["names"]]
VALUES_OF_SETTINGS = [(entry, *value) for entry in SETTINGS for value in VALUES[entry.name]]


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
    """A folder that says that it holds a model; returns a function that writes its files."""

    def write(config: object = None, generation_config: object = None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        return tmp_path

    return write


# Where a value comes from


def test_the_model_that_sagemaker_unpacks_is_served_when_none_is_named(model, monkeypatch):
    folder = model()
    monkeypatch.setattr(config, "SAGEMAKER_MODEL", folder)
    assert parse([], {}).model_id == str(folder)
    assert parse([], {"HF_MODEL_ID": "someone/model"}).model_id == "someone/model"
    (folder / "config.json").unlink()
    assert parse([], {}).is_demo


def test_the_port_that_sagemaker_asks_for_comes_first():
    assert of(PORT="80", SAGEMAKER_BIND_TO_PORT="8081").port == 8081
    assert of("--port", "82", SAGEMAKER_BIND_TO_PORT="8081").port == 82


def test_origins_may_be_given_in_a_list_and_by_repeating_the_flag():
    both = "https://a.example,https://b.example"
    assert of("--cors-allow-origin", both).cors_allow_origin == both
    assert of("--cors-allow-origin", "https://a.example/", "--cors-allow-origin=https://b.example").cors_allow_origin == both
    assert "'a.example' is no origin" in refusal(CORS_ALLOW_ORIGIN="a.example")


def test_what_cannot_be_honoured_yet_stops_the_boot_by_name():
    assert "SM_NUM_GPUS '4': must be 1" in refusal(SM_NUM_GPUS="4")
    assert "HF_MODEL_QUANTIZE 'awq': must be none, int8 or int4" in refusal(HF_MODEL_QUANTIZE="awq")
    assert "--tokenizer-config-path '/nowhere': there is no such file" in refusal("--tokenizer-config-path", "/nowhere")


def test_weights_are_not_compressed_unless_that_is_wanted():
    assert of().quantize is of("--quantize", "none").quantize is None


def test_every_setting_is_tried_here():
    assert list(VALUES) == [entry.name for entry in SETTINGS]


def test_no_two_settings_share_a_name():
    names = [name for _, name in BY_NAME]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("entry", "name"), BY_NAME, ids=lambda value: getattr(value, "name", value))
def test_every_setting_is_reachable_by_each_of_its_environment_names(entry, name):
    for written, meant in VALUES[entry.name]:
        environ = {name: written} if entry.name == "model_id" else HUB_MODEL | {name: written}
        got = parse([], environ)
        assert getattr(got, entry.name) == meant
        assert dataclasses.replace(got, **{entry.name: getattr(of(), entry.name)}) == of(), "and nothing else changes"


@pytest.mark.parametrize(("entry", "written", "meant"), VALUES_OF_SETTINGS)
def test_every_setting_is_reachable_by_its_flag_in_both_forms(entry, written, meant):
    assert getattr(of(flag_name(entry), written), entry.name) == meant
    assert getattr(of(f"{flag_name(entry)}={written}"), entry.name) == meant


@pytest.mark.parametrize(("entry", "name"), BY_NAME, ids=lambda value: getattr(value, "name", value))
def test_a_flag_beats_the_environment_which_beats_the_default(entry, name):
    (first, meant_first), (second, meant_second) = VALUES[entry.name]
    for in_flag, in_environment, meant in [(first, second, meant_first), (second, first, meant_second)]:
        assert getattr(parse([flag_name(entry), in_flag], HUB_MODEL | {name: in_environment}), entry.name) == meant
    assert entry.default != meant_first or meant_first == meant_second  # some take one value only, so far


def test_without_any_setting_the_demonstration_model_is_served_with_the_defaults():
    got = parse([], {"PATH": "/bin", "HOME": "/root"})
    assert got == Config()
    assert (got.is_demo, got.is_local, got.model_name) == (True, True, "neuron-textgen/demo")


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
@pytest.mark.parametrize(("entry", "name"), BY_NAME, ids=lambda value: getattr(value, "name", value))
def test_an_empty_variable_counts_as_unset(entry, name, empty):
    if entry.name == "model_id":
        assert parse(["--model-id", "someone/model"], {name: empty}) == of()
    else:
        assert of(**{name: empty}) == of()


def test_space_around_a_value_of_the_environment_does_not_matter():
    assert of(DEVICE=" cpu\n", PORT=" 9000 ") == of(DEVICE="cpu", PORT="9000")


@pytest.mark.parametrize(
    ("new", "old", "name"),
    [
        ("MODEL_ID", "HF_MODEL_ID", "model_id"),
        ("MAX_BATCH_SIZE", "HF_BATCH_SIZE", "max_batch_size"),
        ("MAX_TOTAL_TOKENS", "HF_SEQUENCE_LENGTH", "max_total_tokens"),
        ("DTYPE", "HF_AUTO_CAST_TYPE", "dtype"),
    ],
)
def test_the_names_of_older_servers_work_and_give_way_to_the_current_ones(new, old, name):
    (written, meant), (other, _) = VALUES[name]
    assert getattr(of(**{new: "", old: written}), name) == meant
    assert getattr(of(**{new: written, old: other}), name) == meant


def test_the_old_name_of_max_input_tokens_works_as_variable_and_as_flag():
    assert of(MAX_INPUT_LENGTH="70").max_input_tokens == 70
    assert of("--max-input-length", "70").max_input_tokens == 70


def test_both_names_of_max_input_tokens_are_refused():
    told = refusal(MAX_INPUT_TOKENS="70", MAX_INPUT_LENGTH="80")
    assert told.startswith("Both `max_input_tokens` (70) and `max_input_length` (80) are set.")
    assert "--max-input-length is given twice" in refusal("--max-input-tokens", "70", "--max-input-length", "80")


def test_a_hostname_variable_that_is_no_address_is_not_used():
    for name in ("ip-10-0-0-1.ec2.internal", "a1b2c3d4e5f6", "localhost", "0.0.0.0.0"):
        assert of(HOSTNAME=name).hostname == "0.0.0.0"
    assert of(HOSTNAME="10.0.0.1").hostname == "10.0.0.1"


def test_a_hostname_flag_must_be_an_address():
    assert "myhost" in refusal("--hostname", "myhost")
    assert of("--hostname", "localhost").hostname == "127.0.0.1"


def test_a_switch_needs_no_value():
    assert of("--json-output").json_output is True
    assert of("--json-output", "--port", "9000") == of("--json-output", "true", "--port=9000")
    assert of("--json-output", "false", JSON_OUTPUT="true").json_output is False


@pytest.mark.parametrize(
    ("word", "meant"), [("1", True), ("yes", True), ("TRUE", True), ("0", False), ("no", False), ("False", False)]
)
def test_a_switch_takes_the_usual_words(word, meant):
    assert of(JSON_OUTPUT=word).json_output is meant
    assert of(f"--trust-remote-code={word}").trust_remote_code is meant


# What is refused, and in which words


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("--max-batchsize", "--max-batch-size"),
        ("--max_total_tokens", "--max-total-tokens"),
        ("--model", "--model-id"),
        ("--prot=8080", "--port"),
        ("-port", "--port"),
    ],
)
def test_an_unknown_flag_names_the_nearest(typed, nearest):
    told = refusal(typed, "5")
    assert repr(typed.split("=")[0]) in told
    assert f"did you mean {nearest}?" in told
    assert "--help" in told


@pytest.mark.parametrize("typed", ["serve", "8080", "--zzzzzzzz", "-", "--", "", "a\nb"])
def test_what_resembles_no_flag_is_refused_too(typed):
    told = refusal(typed)
    assert f"unknown argument {typed!r}" in told
    assert "--help" in told


TAKING_A_VALUE = [flag_name(entry) for entry in SETTINGS if not isinstance(entry.default, bool)]


@pytest.mark.parametrize("flag", TAKING_A_VALUE)
def test_a_value_that_is_missing_is_asked_for(flag):
    assert refusal(flag) == refusal(flag, "--json-output") == f"{flag} needs a value"


def test_an_empty_value_is_a_missing_one():
    for flag in TAKING_A_VALUE:
        assert refusal(flag, "") == f"{flag} needs a value"
    for flag in map(flag_name, SETTINGS):
        assert refusal(f"{flag}=") == f"{flag} needs a value"


@pytest.mark.parametrize("entry", [e for e in SETTINGS if e.name != "cors_allow_origin"], ids=lambda entry: entry.name)
def test_a_flag_that_is_given_twice_is_refused(entry):
    flag, value = flag_name(entry), VALUES[entry.name][0][0]
    assert f"{flag} is given twice" in refusal(flag, value, f"{flag}={value}")


def test_the_short_name_of_the_port_is_the_port():
    assert of("-p", "9000").port == 9000
    assert "given twice" in refusal("-p", "9000", "--port", "9000")


WHOLE_NUMBERS = dict.fromkeys(("many", "2.5", "1e3", "0x10", "5 GB"), "must be a whole number")
COUNT = WHOLE_NUMBERS | dict.fromkeys(("0", "-1"), "must be at least 1")
PORT = WHOLE_NUMBERS | dict.fromkeys(("0", "65536", "-1"), "must be between 1 and 65535")
POSITIVE = dict.fromkeys(("soon", "5s", "0", "-1", "inf", "nan", "1e999"), "must be a positive number")
WRONG = {
    **{entry.name: COUNT for entry in SETTINGS if entry.name.startswith(("max_", "web_", "payload_", "threads"))},
    **{entry.name: POSITIVE for entry in SETTINGS if entry.name.endswith(("_timeout", "_time", "_cache_size"))},
    **{entry.name: {"maybe": "must be true or false"} for entry in SETTINGS if isinstance(entry.default, bool)},
    "port": PORT,
    "device": {"tpu": "must be one of auto, cpu, cuda, neuron", "CPU": "must be one of auto, cpu, cuda, neuron"},
    "dtype": {"int3": "must be one of auto, float32, bfloat16, float16"},
}


@pytest.mark.parametrize("entry", [entry for entry in SETTINGS if entry.name in WRONG], ids=lambda entry: entry.name)
def test_a_value_that_cannot_be_is_told_with_its_name_and_what_it_must_be(entry):
    for value, words in WRONG[entry.name].items():
        assert refusal(f"{flag_name(entry)}={value}") == f"{flag_name(entry)} {value!r}: {words}"
        for name in entry.metadata["names"]:
            assert refusal(**{name: value}) == f"{name} {value!r}: {words}"


def test_the_ends_of_the_range_of_ports_are_ports():
    assert (of("--port", "1").port, of("--port", "65535").port) == (1, 65535)


@pytest.mark.parametrize("longest_input", ["100", "101", "5000"])
def test_a_window_without_room_for_an_answer_is_refused(longest_input):
    told = refusal("--max-input-tokens", longest_input, MAX_TOTAL_TOKENS="100")
    assert f"`max_input_tokens`({longest_input}) must be < `max_total_tokens`(100)" in told
    for name in ("--max-input-tokens", "MAX_INPUT_TOKENS", "--max-total-tokens", "MAX_TOTAL_TOKENS"):
        assert name in told
    assert of("--max-input-tokens", "99", MAX_TOTAL_TOKENS="100").max_input_tokens == 99


def test_a_window_of_one_token_is_refused():
    assert refusal("--max-total-tokens", "1").startswith("--max-total-tokens 1: must be at least 2")
    assert of("--max-total-tokens", "2").max_total_tokens == 2


# Which model


def test_a_hub_id_is_not_looked_for_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert not of("--model-id", "someone/model").is_local
    assert not of("--model-id", "gpt2").is_local
    assert of().model_name == "someone/model"


@pytest.mark.parametrize("written", ["/no/such/folder", "./nowhere", "../nowhere", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_refused_as_a_path(monkeypatch, tmp_path, written):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    told = refusal("--model-id", written)
    assert told.startswith("--model-id ")
    assert told.endswith("there is no such folder")


def test_a_folder_is_checked_for_a_model(tmp_path, model):
    assert "holds no config.json" in refusal("--model-id", str(tmp_path))
    assert of("--model-id", str(model())).model_name == str(tmp_path)


def test_a_folder_beats_a_hub_id_of_the_same_name(tmp_path, monkeypatch, model):
    monkeypatch.chdir(model().parent)
    assert of("--model-id", tmp_path.name).is_local


# The file between the processes


@pytest.mark.parametrize("argv", [[], [part for entry in SETTINGS for part in (flag_name(entry), VALUES[entry.name][0][0])]])
def test_a_configuration_survives_its_json(argv):
    got = of(*argv)
    assert Config.from_json(got.to_json()) == got
    assert Config.from_json(got.to_json().encode()) == got
    assert list(json.loads(got.to_json())) == [entry.name for entry in SETTINGS]


def test_a_run_reads_back_what_was_resolved_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", str(tmp_path))
    (tmp_path / "config.json").write_text(of("--port", "9000").to_json())
    assert config.load() == of("--port", "9000")
    assert config.socket_address() == f"ipc://{tmp_path}/worker.sock"


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        of().port = 1


# What a checkpoint says of itself


def test_a_manifest_is_read_from_both_files(model):
    folder = model(
        {"model_type": "llama", "max_position_embeddings": 4096, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9], "top_k": 50}
    )
    assert Manifest.read(folder) == Manifest.read(str(folder)) == Manifest("llama", 4096, (2, 7, 9))


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "eos_token_ids"),
    [
        ({}, None, ()),
        ({"eos_token_id": None}, {}, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": [2, 3]}, None, (2, 3)),
        ({}, {"eos_token_id": 4}, (4,)),
        ({"eos_token_id": 2}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": [4, 3]}, (2, 3, 4)),
        ({"eos_token_id": "</s>"}, {"eos_token_id": [4, None, "x"]}, (4,)),
    ],
)
def test_every_eos_id_that_either_file_names_counts(model, in_config, in_generation_config, eos_token_ids):
    assert Manifest.read(model({"model_type": "llama", **in_config}, in_generation_config)).eos_token_ids == eos_token_ids


@pytest.mark.parametrize(
    ("told", "window"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"seq_length": 512}, 512),
        ({"max_position_embeddings": 4096, "n_positions": 1024}, 4096),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"text_config": None, "max_position_embeddings": 4096}, 4096),
    ],
)
def test_the_window_is_read_under_each_of_its_names(model, told, window):
    assert Manifest.read(model({"model_type": "llama", **told})).max_positions == window


def test_a_manifest_of_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--model-id .*/nowhere: there is no such folder$"):
        Manifest.read(tmp_path / "nowhere")


def test_a_home_folder_is_understood(model, monkeypatch):
    folder = model()
    monkeypatch.setenv("HOME", str(folder.parent))
    assert Manifest.read(f"~/{folder.name}").model_type == "llama"


def test_a_folder_without_config_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json, so it is no model folder$"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "config.json cannot be read as JSON"),
        (b"{", "config.json cannot be read as JSON"),
        (b'{"model_type": "llama",}', "config.json cannot be read as JSON"),
        (b"\xff\xfe", "config.json cannot be read as JSON"),
        (b"[" * 100_000, "config.json cannot be read as JSON"),
        (b"[]", "config.json should hold a JSON object, not list"),
        (b'"llama"', "config.json should hold a JSON object, not str"),
        (b"null", "config.json should hold a JSON object, not NoneType"),
        (b"{}", "config.json names no `model_type`"),
        (b'{"model_type": 5}', "config.json names no `model_type`"),
        (b'{"model_type": null}', "config.json names no `model_type`"),
    ],
    ids=lambda value: repr(value[:25]),
)
def test_a_config_json_that_cannot_be_used_is_refused_with_the_reason(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        Manifest.read(tmp_path)
    message = str(refused.value)
    assert words in message
    assert str(tmp_path) in message
    assert len(message.splitlines()) == 1


def test_a_broken_generation_config_is_refused_and_not_passed_over(model):
    folder = model()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read as JSON"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    ("argv", "window", "total", "longest_input"),
    [
        ([], 1024, 1024, 1023),
        ([], DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS - 1),
        ([], 131_072, DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS - 1),
        ([], None, DEFAULT_MAX_TOTAL_TOKENS, DEFAULT_MAX_TOTAL_TOKENS - 1),
        (["--max-total-tokens", "4096"], 4096, 4096, 4095),
        (["--max-total-tokens", "4096"], None, 4096, 4095),
        (["--max-total-tokens", "100"], 4096, 100, 99),
        (["--max-input-tokens", "50"], 1024, 1024, 50),
        (["--max-input-tokens", "1023"], 1024, 1024, 1023),
        (["--max-total-tokens", "100", "--max-input-tokens", "50"], 4096, 100, 50),
    ],
)
def test_what_is_left_open_is_taken_from_the_model(argv, window, total, longest_input):
    got = of(*argv).with_manifest(Manifest("llama", window, ()))
    assert (got.max_total_tokens, got.max_input_tokens) == (total, longest_input)
    assert dataclasses.replace(got, max_total_tokens=None, max_input_tokens=None) == of()


def test_a_window_that_the_model_does_not_have_is_refused_with_both_numbers():
    with pytest.raises(ConfigError) as refused:
        of("--max-total-tokens", "4097").with_manifest(Manifest("llama", 4096, ()))
    message = str(refused.value)
    for words in ("--max-total-tokens 4097", "MAX_TOTAL_TOKENS", "4096 positions", "someone/model", "at most 4096"):
        assert words in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("window", "total"), [(1024, 1024), (131_072, DEFAULT_MAX_TOTAL_TOKENS)])
def test_a_prompt_that_does_not_fit_the_models_window_is_refused_with_both_numbers(window, total):
    with pytest.raises(ConfigError, match=rf"`max_input_tokens`\({total}\) must be < `max_total_tokens`\({total}\)"):
        of("--max-input-tokens", str(total)).with_manifest(Manifest("llama", window, ()))


# What people read


@pytest.mark.parametrize("width", [80, 110])
def test_the_help_fits_the_terminal(width):
    assert max(len(line) for line in config.help_text(width).splitlines()) <= width


def test_the_help_names_every_setting_its_variables_its_meaning_and_its_default():
    words = " ".join(config.help_text(80).split())
    for entry in SETTINGS:
        assert f"{flag_name(entry)} [{', '.join(entry.metadata['names'])}] {entry.metadata['help']} Default: " in words
    for default in ("Default: 8080.", "Default: 0.0.0.0.", "Default: false.", "Default: 25.", "Default: max_total_tokens - 1."):
        assert default in words
    assert str(DEMO_MODEL) not in words


def test_the_markdown_table_has_a_row_for_each_setting():
    head, rule, *rows = config.markdown_table().splitlines()
    assert len(rows) == len(SETTINGS)
    assert all(row.count("|") == 5 for row in (head, rule, *rows))
    for entry, row in zip(SETTINGS, rows):
        _, flag, names, default, meaning, _ = (cell.strip() for cell in row.split("|"))
        assert flag == f"`{flag_name(entry)}`"
        assert names == ", ".join(f"`{name}`" for name in entry.metadata["names"])
        assert default
        assert meaning == entry.metadata["help"]


# As a process


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess:
    clean = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"} | environ
    return subprocess.run([sys.executable, HERE / "config.py", *argv], env=clean, capture_output=True, text=True)


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
    folder = model()
    done = run("--port", "9000", MODEL_ID=str(folder), MAX_BATCH_SIZE="2")
    assert done.returncode == 0
    assert Config.from_json(done.stdout) == Config(model_id=str(folder), port=9000, max_batch_size=2)
    assert done.stderr.count("\n") == 1
    assert config.VERSION in done.stderr
    assert str(folder) in done.stderr


def test_the_help_and_the_table_are_printed_whatever_else_is_wrong():
    shown = run("--port", "http", "--help", COLUMNS="80")
    assert (shown.returncode, shown.stderr, shown.stdout) == (0, "", config.help_text(80) + "\n")
    table = run("--markdown")
    assert (table.returncode, table.stderr, table.stdout) == (0, "", config.markdown_table() + "\n")


def test_with_json_output_every_line_of_the_log_is_json():
    done = run("--json-output", **HUB_MODEL)
    assert done.returncode == 0
    line = json.loads(done.stderr)
    assert list(line) == ["timestamp", "level", "target", "fields"]
    assert (line["level"], line["target"]) == ("INFO", "config")
    assert "someone/model" in line["fields"]["message"]


def test_a_setting_without_effect_is_accepted_and_one_line_says_so():
    done = run(**HUB_MODEL, CUDA_GRAPHS="1,2,4")
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "--cuda-graphs (CUDA_GRAPHS) has no effect" in line]


def test_log_level_says_what_is_logged():
    assert run(**HUB_MODEL, LOG_LEVEL="warning").stderr == ""
    assert run(**HUB_MODEL, LOG_LEVEL="nonsense").stderr.count("\n") == 1


@pytest.fixture
def log_line(monkeypatch, capsys):
    """Logs one record and returns what was written, leaving the logging of the tests as it was."""

    def write(json_output: bool, exc_info=None) -> str:
        root = logging.getLogger()
        monkeypatch.setattr(root, "handlers", list(root.handlers))
        monkeypatch.setattr(root, "level", root.level)
        config.set_up_logging(json_output)
        logging.getLogger("web").error("it is %d\nlines", 2, extra={"fields": {"request": 7}}, exc_info=exc_info)
        return capsys.readouterr().err

    return write


def test_a_log_line_carries_named_values(log_line):
    assert log_line(False).endswith("Z ERROR web: it is 2\nlines request=7\n")


def test_a_json_log_line_carries_named_values_and_the_traceback_in_one_line(log_line):
    try:
        raise ValueError("wrong")
    except ValueError as error:
        written = log_line(True, exc_info=error)
    assert written.count("\n") == 1
    fields = json.loads(written)["fields"]
    assert fields["request"] == 7
    assert fields["message"].startswith("it is 2\nlines\nTraceback")
    assert fields["message"].endswith("ValueError: wrong")
