"""Compiled graphs on disk: what a manifest holds, which settings contradict it, and what a cache finds."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import Config
from models.cache import evict
from models.neuron.artifact import (
    Artifact,
    CachedGraphs,
    CompiledConfig,
    check_compiler,
    config_digest,
    with_compiled_config,
    with_optimum,
)
from run import ConfigError

PROGRAMS = CompiledConfig(
    batch_size=4,
    tp_degree=2,
    dtype="bfloat16",
    prefill_buckets=(128, 512),
    position_buckets=(128, 512, 1024),
    quantize=None,
    sampling="host",
    compiler_version="2.20.9961.0",
    transformers_neuronx_version="0.13.1216",
)
OPTIMUM = {
    "task": "text-generation",
    "batch_size": 4,
    "num_cores": 2,
    "auto_cast_type": "bf16",
    "sequence_length": 1000,
    "compiler_type": "neuronx-cc",
    "compiler_version": "2.16.372.0",
    "checkpoint_id": "meta/llama",
    "checkpoint_revision": "abc",
}
counts = st.lists(st.integers(1, 1 << 17), min_size=1, max_size=9, unique=True).map(lambda lengths: tuple(sorted(lengths)))


def folder_with(tmp_path, section):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "neuron": section}))
    return tmp_path


def read(folder):
    source = folder / "config.json"
    return Artifact.of(json.loads(source.read_text()), source)


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as refused:
        call(*arguments)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@given(
    st.builds(
        CompiledConfig,
        batch_size=st.integers(1, 64),
        tp_degree=st.integers(1, 32),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        prefill_buckets=counts,
        position_buckets=counts,
        quantize=st.sampled_from([None, "int8"]),
        sampling=st.sampled_from(["host", "device"]),
        compiler_version=st.text(min_size=1),
        transformers_neuronx_version=st.text(min_size=1),
        neuron_config=st.sampled_from([(), ("collectives_layout=BSH", "sequence_parallel_norm_threshold=512")]),
    )
)
def test_a_manifest_is_read_as_it_was_written(tmp_path_factory, programs):
    section = json.loads(json.dumps(dataclasses.asdict(programs)))
    assert read(folder_with(tmp_path_factory.getbasetemp(), section)).compiled_config == programs


def test_a_folder_of_optimum_neuron_gives_its_values_and_its_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO")
    found = read(folder_with(tmp_path, OPTIMUM))
    assert (found.compiled_config, found.checkpoint_id, found.checkpoint_revision) == (None, "meta/llama", "abc")
    config = with_optimum(Config(model_id="/x"), found.optimum)
    assert (config.max_batch_size, config.max_total_tokens, config.tp_degree, config.dtype) == (4, 1000, 2, "bfloat16")
    assert caplog.messages == [
        "The compiled graphs of optimum-neuron cannot be loaded; /x is compiled with its values: "
        "--max-batch-size 4 (MAX_BATCH_SIZE), --max-total-tokens 1000 (MAX_TOTAL_TOKENS), "
        "--tp-degree 2 (TP_DEGREE), --dtype bfloat16 (DTYPE)"
    ]


def test_settings_come_before_the_values_of_optimum_neuron(tmp_path):
    given = {"max_batch_size": 2, "max_total_tokens": 64, "tp_degree": 8, "dtype": "float32"}
    optimum = read(folder_with(tmp_path, OPTIMUM)).optimum
    assert with_optimum(Config(model_id="/x", **given), optimum) == Config(model_id="/x", **given)


def test_a_plain_checkpoint_is_not_a_compiled_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_size": None}, "Expected `int`, got `null` - at `$.batch_size`"),
        ({"batch_size": True}, "Expected `int`, got `bool` - at `$.batch_size`"),
        ({"num_cores": 0}, "Expected `int` >= 1 - at `$.num_cores`"),
        ({"auto_cast_type": "int4"}, "Invalid enum value 'int4' - at `$.auto_cast_type`"),
        ({"auto_cast_type": "auto"}, "Invalid enum value 'auto' - at `$.auto_cast_type`"),
        ({"task": "feature-extraction"}, "Invalid enum value 'feature-extraction' - at `$.task`"),
        ({"prefill_buckets": None}, "Expected `array`, got `null` - at `$.prefill_buckets`"),
        ({"prefill_buckets": [0]}, "Expected `int` >= 1 - at `$.prefill_buckets[0]`"),
        ({"prefill_buckets": ["a"]}, "Expected `int`, got `str` - at `$.prefill_buckets[0]`"),
        ({"position_buckets": []}, "Expected `array` of length >= 1 - at `$.position_buckets`"),
        ({"quantize": "int4"}, "Invalid enum value 'int4' - at `$.quantize`"),
        ({"prefill_chunk": -1}, "Expected `int` >= 0 - at `$.prefill_chunk`"),
        ({"sampling": "banana"}, "Invalid enum value 'banana' - at `$.sampling`"),
        ({"exporter": "banana"}, "Invalid enum value 'banana' - at `$.exporter`"),
        ({"dtype": "bf16"}, "Invalid enum value 'bf16' - at `$.dtype`"),
        ({"continuous_batching": "yes"}, "Expected `bool`, got `str` - at `$.continuous_batching`"),
        ({"position_buckets": [0]}, "Expected `int` >= 1 - at `$.position_buckets[0]`"),
        ({"tp_degree": 0}, "Expected `int` >= 1 - at `$.tp_degree`"),
        ({"batch_size": 10**12}, "Expected `int` <= 1000000 - at `$.batch_size`"),
        ({"batch_size": 10**30, "exporter": "neuron-textgen"}, "- at `$.batch_size`"),
        ({"compiler_version": None, "exporter": "neuron-textgen"}, "Expected `str`, got `null` - at `$.compiler_version`"),
        ({"transformers_neuronx_version": None}, "Expected `str`, got `null` - at `$.transformers_neuronx_version`"),
        ({"checkpoint_id": 5, "exporter": "neuron-textgen"}, "Expected `str | null`, got `int` - at `$.checkpoint_id`"),
        ({"checkpoint_revision": []}, "Expected `str | null`, got `array` - at `$.checkpoint_revision`"),
        ({"files": {"a.neff": "abc"}}, "Expected `array`, got `str` - at `$.files[...]`"),
        ({"rope_base": 5, "exporter": "neuron-textgen"}, "Object contains unknown field `rope_base`"),
    ],
    ids=str,
)
def test_an_incomplete_or_wrong_manifest_is_refused_by_the_field(tmp_path, change, reason):
    section = json.loads(json.dumps(dataclasses.asdict(PROGRAMS))) if set(change) - set(OPTIMUM) else OPTIMUM
    assert reason in refusal(read, folder_with(tmp_path, section | change))


@pytest.mark.parametrize("section", [[], "yes", 1])
def test_a_manifest_that_is_not_an_object_is_refused(tmp_path, section):
    assert "`neuron` cannot be served (Expected `object`" in refusal(read, folder_with(tmp_path, section))


def test_values_that_are_left_open_come_from_the_manifest():
    config = with_compiled_config(Config(model_id="/x"), PROGRAMS)
    assert (config.max_batch_size, config.tp_degree, config.dtype) == (4, 2, "bfloat16")
    assert (config.max_total_tokens, config.max_input_tokens) == (1024, 512)


def test_smaller_limits_and_equal_values_are_accepted():
    config = Config(model_id="/x", max_batch_size=2, max_total_tokens=300, max_input_tokens=100)
    expected = dataclasses.replace(config, tp_degree=2, dtype="bfloat16", sampling="host")
    assert with_compiled_config(config, PROGRAMS) == expected
    assert with_compiled_config(Config(model_id="/x", max_total_tokens=300), PROGRAMS).max_input_tokens == 299
    equal = {"tp_degree": 2, "dtype": "bfloat16", "prefill_buckets": (128,), "position_buckets": (128, 512, 1024)}
    assert with_compiled_config(Config(model_id="/x", **equal), PROGRAMS).tp_degree == 2


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"max_batch_size": 5}, "--max-batch-size 5 (MAX_BATCH_SIZE) is more than the 4 that /x was compiled for"),
        ({"max_total_tokens": 1025}, "--max-total-tokens 1025 (MAX_TOTAL_TOKENS) is more than the 1024"),
        ({"max_input_tokens": 513}, "--max-input-tokens 513 (MAX_INPUT_TOKENS) is more than the 512"),
        ({"tp_degree": 1}, "--tp-degree 1 (TP_DEGREE) contradicts /x, compiled for 2"),
        ({"dtype": "float16"}, "--dtype float16 (DTYPE) contradicts /x, compiled for bfloat16"),
        ({"quantize": "int8"}, "--quantize int8 (QUANTIZE) contradicts /x, compiled for none"),
        ({"prefill_buckets": (64, 128)}, "--prefill-buckets 64,128 (PREFILL_BUCKETS) contradicts /x, comp"),
        ({"sampling": "device"}, "--sampling device (SAMPLING) contradicts /x, compiled for host"),
        (
            {"neuron_config": ("on_device_embedding=true",)},
            "--neuron-config on_device_embedding=true (NEURON_CONFIG) contradicts /x, compiled for none",
        ),
        ({"position_buckets": (256,)}, "--position-buckets 256 (POSITION_BUCKETS) contradicts /x"),
        ({"prefill_chunk": 128}, "--prefill-chunk 128 (PREFILL_CHUNK) contradicts /x, compiled for 0"),
        ({"kv_cache_dtype": "fp8_e4m3fn"}, "--kv-cache-dtype fp8_e4m3fn (KV_CACHE_DTYPE) contradicts /x, compiled for none"),
    ],
    ids=str,
)
def test_a_setting_that_contradicts_the_manifest_is_refused_with_both_values(setting, reason):
    message = refusal(with_compiled_config, Config(model_id="/x", **setting), PROGRAMS)
    assert reason in message
    assert "compile it again" in message


@given(st.integers(1, 8), st.integers(2, 2000), st.integers(1, 2000))
def test_limits_that_are_accepted_can_be_run(slots, total, prompt):
    try:
        config = Config(model_id="/x", max_batch_size=slots, max_total_tokens=total, max_input_tokens=prompt)
        found = with_compiled_config(config, PROGRAMS)
    except ConfigError:
        assert slots > 4 or total > 1024 or prompt > 512 or prompt >= total
    else:
        assert found.max_batch_size <= 4 and found.max_input_tokens <= 512
        assert found.max_input_tokens < found.max_total_tokens <= 1024


@pytest.mark.parametrize("version", ["2.20.9961.0", "2.20.9961.0+0acef03a", "2.21.0", "2.20.10000.0", "3.0"])
def test_the_same_compiler_and_newer_ones_are_accepted(version):
    check_compiler(PROGRAMS, version, "/x")


def test_programs_of_a_newer_compiler_are_refused_with_both_versions():
    message = refusal(check_compiler, PROGRAMS, "2.16.372.0", "/x")
    assert "/x was compiled by neuronx-cc 2.20.9961.0, newer than the installed 2.16.372.0" in message


def test_programs_of_a_compiler_without_a_version_are_refused():
    compiled = dataclasses.replace(PROGRAMS, compiler_version="latest")
    assert "/x was compiled by neuronx-cc 'latest', which is no version" in refusal(check_compiler, compiled, "2.20", "/x")


def save_programs(folder):
    Path(folder, "a.neff").write_text("a program")


def keep(graphs, save=save_programs):
    graphs.add(save, graphs.compiled_config)
    return graphs.folder


def test_a_cache_finds_its_own_entries_and_nothing_else(tmp_path):
    cache = functools.partial(CachedGraphs, tmp_path / "cache", 1.0)
    assert cache("model", PROGRAMS).find() is None
    entry = keep(cache("model", PROGRAMS))
    assert cache("model", PROGRAMS).find() == PROGRAMS
    assert (entry / "a.neff").read_text() == "a program"
    assert cache("other", PROGRAMS).find() is None
    assert cache("model", dataclasses.replace(PROGRAMS, batch_size=8)).find() is None


def test_what_a_newer_version_added_changes_no_key_where_it_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    monkeypatch.setattr("models.neuron.artifact.installed", lambda package: None)
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    assert keep(cache("model", PROGRAMS)).name == "ae7bb255f0c8fef2b38b5409891decd8"
    for added in ({"verify_length": 4}, {"kv_cache_dtype": "fp8_e4m3fn"}):
        assert cache("model", dataclasses.replace(PROGRAMS, **added)).find() is None


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("a.neff", Path.unlink, "a.neff is missing"),
        ("a.neff", lambda path: path.write_text(""), "a.neff is damaged: it has 0 bytes instead of 9"),
        ("a.neff", lambda path: path.write_text("a Program"), "a.neff is damaged: its SHA-256 differs"),
        ("programs.json", lambda path: path.write_text("{"), "programs.json is damaged"),
        ("programs.json", lambda path: path.write_text('{"files": {"a.neff": 5}}'), "programs.json is damaged"),
        ("programs.json", lambda path: path.write_text('{"files": []}'), "programs.json is damaged"),
    ],
)
def test_a_damaged_file_is_named_and_its_programs_are_removed(tmp_path, name, damage, reason, caplog):
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    entry = keep(cache("model", PROGRAMS))
    damage(entry / name)
    assert cache("model", PROGRAMS).find() is None
    assert caplog.messages == [f"{entry}/{reason}: removing these compiled graphs from the cache, to compile again"]
    assert not entry.exists()
    keep(cache("model", PROGRAMS))
    assert cache("model", PROGRAMS).find() == PROGRAMS


def test_the_least_recently_used_programs_go_first(tmp_path, caplog):
    caplog.set_level("INFO")
    size = sum(file.stat().st_size for file in keep(CachedGraphs(tmp_path / "other", 1.0, "a", PROGRAMS)).iterdir())
    cache = functools.partial(CachedGraphs, tmp_path / "cache", 2.5 * size / 1e9)
    for age, model in enumerate("abc"):
        entry = keep(cache(model, PROGRAMS))
        os.utime(entry / "programs.json", (age, age))
        if model == "b":
            assert cache("a", PROGRAMS).find()  # used now
    assert [bool(cache(model, PROGRAMS).find()) for model in "abc"] == [True, False, True]
    assert "the cache exceeds --compile-cache-size (COMPILE_CACHE_SIZE)" in caplog.text


def test_programs_that_another_process_removes_meanwhile_do_not_matter(tmp_path):
    kept = keep(CachedGraphs(tmp_path, 1.0, "a", PROGRAMS))
    evict([tmp_path / "removed" / "programs.json", kept / "programs.json"], 1.0, "--compile-cache-size")
    assert kept.exists()


def test_programs_are_kept_even_where_they_alone_are_more_than_the_cache_may_hold(tmp_path):
    cache = functools.partial(CachedGraphs, tmp_path, 1e-9)
    keep(cache("a", PROGRAMS))
    assert cache("a", PROGRAMS).find()


def test_what_an_interrupted_compile_left_is_removed_by_the_next_and_a_running_one_is_not_disturbed(tmp_path):
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    (tmp_path / ".neuron-textgen-abandoned.new").mkdir()

    def save(folder):
        save_programs(folder)
        keep(cache("b", PROGRAMS))  # another process, at the same time
        assert Path(folder, "a.neff").exists()

    entry = keep(cache("a", PROGRAMS), save)
    assert {path.name for path in tmp_path.iterdir()} == {entry.name, cache("b", PROGRAMS).folder.name}


@pytest.mark.parametrize("package", ["torch-neuronx", "libneuronxla"])
def test_programs_for_another_version_of_the_runtime_are_not_found(tmp_path, monkeypatch, package):
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    keep(cache("model", PROGRAMS))
    monkeypatch.setattr("models.neuron.artifact.installed", lambda name: "2.9" if name == package else None)
    assert cache("model", PROGRAMS).find() is None


@pytest.mark.parametrize("change", [{"compiler_version": "2.21"}, {"transformers_neuronx_version": "0.14"}])
def test_programs_of_another_compiler_or_library_are_not_found(tmp_path, change):
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    keep(cache("model", PROGRAMS))
    assert cache("model", dataclasses.replace(PROGRAMS, **change)).find() is None


def test_programs_for_other_compiler_flags_are_not_found(tmp_path, monkeypatch):
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    keep(cache("model", PROGRAMS))
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O2")
    assert cache("model", PROGRAMS).find() is None


def test_an_entry_that_was_not_saved_completely_is_not_found(tmp_path):
    def save_half(folder):
        save_programs(folder)
        raise OSError(28, "No space left on device")

    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    with pytest.raises(OSError):
        cache("model", PROGRAMS).add(save_half, PROGRAMS)
    assert cache("model", PROGRAMS).find() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"model": "model", "programs": 1}', '{"model": 1, "programs": {}}'])
def test_a_damaged_record_does_not_matter(tmp_path, record):
    cache = functools.partial(CachedGraphs, tmp_path, 1.0)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "programs.json").write_text(record)
    assert cache("model", PROGRAMS).find() is None
    keep(cache("model", PROGRAMS))
    assert cache("model", PROGRAMS).find()


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        (None, "/var/tmp/neuron-compile-cache/neuron-textgen"),
        ("", "/var/tmp/neuron-compile-cache/neuron-textgen"),
        ("/data/cache", "/data/cache/neuron-textgen"),
        ("file:///data/cache", "/data/cache/neuron-textgen"),
        ("s3://bucket/cache", None),
    ],
)
def test_the_cache_is_in_the_compilers_cache_folder(monkeypatch, url, folder):
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", url)
    found = CachedGraphs.here(5.0, "model", PROGRAMS)
    assert found == (folder and CachedGraphs(Path(folder), 5.0, "model", PROGRAMS))


def test_the_model_key_depends_on_what_is_computed_alone():
    config = {"model_type": "llama", "hidden_size": 64}
    assert config_digest(config) == config_digest(
        config | {"transformers_version": "4.48.3", "_name_or_path": "/x", "neuron": {}}
    )
    assert config_digest(config) != config_digest(config | {"hidden_size": 128})
