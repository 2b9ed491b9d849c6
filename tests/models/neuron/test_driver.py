"""A driver that does not fit the runtime library is named before anything is loaded, with both ways out."""

import json

import pytest

import models
from config import Config
from models.neuron import driver as neuron_driver
from models.neuron.build import explain
from models.neuron.driver import Versions
from run import ConfigError
from worker import log_failure

OURS = "2.27.23.0-8deec4dbf"  # SDK 2.25's
HOST = "aws-neuronx-dkms=2.28.*, or an AMI of SDK 2.30 or older"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Writes the files of a host with this driver, and an image with this runtime library; None: there is no file."""

    def make(driver, runtime=OURS):
        package = "Package: other\nVersion: 9.9\n\nPackage: aws-neuronx-runtime-lib\nStatus: install ok installed\n"
        package += f"Version: {runtime}\n"
        for name, text in (("DRIVER", driver and f"{driver}\n"), ("PACKAGES", runtime and package)):
            path = tmp_path / name
            path.unlink(missing_ok=True)
            if text:
                path.write_text(text)
            monkeypatch.setattr(neuron_driver, name, path)

    return make


@pytest.mark.parametrize("driver", ["2.21.37.0", "2.26.5.0", "2.27.4.0", "2.28.0.0"])
def test_a_driver_up_to_2_28_works_without_a_word(host, caplog, driver):
    host(driver)
    Versions.read().check()
    assert not caplog.records


@pytest.mark.parametrize("driver", ["2.27.4.0", "2.28.0.0", "2.29.1.0", "2.30.2.0"])
def test_an_image_with_a_newer_runtime_library_works_with_newer_drivers(host, caplog, driver):
    host(driver, "2.33.10.0-abc")
    Versions.read().check()
    assert not caplog.records


@pytest.mark.parametrize(
    ("driver", "runtime", "image"),
    [
        ("2.29.5.0", OURS, "--build-arg NEURON_RUNTIME=2.33"),
        ("2.29", "2.32.1.0", "--build-arg NEURON_RUNTIME=2.33"),
        ("2.26.5.0", "2.32.1.0", "make image without NEURON_RUNTIME"),
        ("2.21.37.0", "2.32.1.0", "make image without NEURON_RUNTIME"),
    ],
)
def test_a_pair_that_fails_ends_the_startup_with_both_ways_out_before_anything_is_loaded(
    host, monkeypatch, caplog, capsys, driver, runtime, image
):
    loaded = []
    monkeypatch.setattr(models, "fetch_source", lambda *given: loaded.append(given))
    host(driver, runtime)
    with pytest.raises(ConfigError) as refused:
        models.prepare(Config(model_id="someone/model", device="neuron"))
    line = str(refused.value)
    assert line.startswith(f"Neuron driver {driver} with runtime library {runtime} fails in nrt_init(); ")
    assert HOST in line and image in line and "\n" not in line
    assert not loaded
    assert log_failure(refused.value) == 2  # the exit code
    assert neuron_driver.main() == 2  # that of the preflight
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"driver": driver, "runtime": runtime} and printed.err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("driver", "runtime", "words"),
    [
        (None, OURS, f"Neuron driver unknown with runtime library {OURS}: whether they fit is not checked"),
        ("2.29.5.0", None, "Neuron driver 2.29.5.0 with runtime library unknown: whether they fit is not checked"),
        ("nonsense", OURS, f"Neuron driver nonsense with runtime library {OURS}: whether they fit is not checked"),
        ("2.30.2.0", OURS, "may fail in nrt_init(); if so, they work where the host has driver 2.28"),
        ("2.41.0.0", OURS, "may fail in nrt_init(); if so, they work where the host has driver 2.28"),
        ("2.26.5.0", "2.33.1.0", "may fail in nrt_init(); if so, they work where the host has driver 2.28"),
        ("2.31.0.0", "2.33.1.0", "the driver is newer than those that this server knows"),
    ],
)
def test_a_pair_of_which_nothing_is_known_is_one_warning_and_no_refusal(host, caplog, driver, runtime, words):
    host(driver, runtime)
    assert neuron_driver.main() == 0
    (record,) = caplog.records
    assert record.levelname == "WARNING" and words in record.getMessage()


def test_where_there_is_neither_a_driver_nor_a_device_nothing_is_compared(host, monkeypatch, caplog):
    monkeypatch.setattr(models, "fetch_source", lambda config, engine: 1 / 0)  # what comes next
    warnings = []
    for machine in (None, "a device"):
        host(None)
        monkeypatch.setattr("models.neuron.detect", lambda machine=machine: machine)
        with pytest.raises(ZeroDivisionError):
            models.prepare(Config(model_id="someone/model", device="neuron"))
        warnings.append(len(caplog.records))
    assert warnings == [0, 1]


def test_a_file_that_cannot_be_read_is_unknown(host, tmp_path):
    host("2.28.0.0")
    (tmp_path / "DRIVER").write_bytes(b"\xff\xfe")
    (tmp_path / "PACKAGES").unlink()
    (tmp_path / "PACKAGES").mkdir()
    assert Versions.read() == Versions(None, None)


def test_after_a_failed_nrt_init_the_pair_is_named_again(host):
    host("2.30.2.0")
    pair = f"Neuron driver 2.30.2.0 with runtime library {OURS}"
    assert explain(RuntimeError("NRT:nrt_init Failed to initialize devices")).endswith(pair)
    assert pair in explain(RuntimeError("The PyTorch Neuron Runtime could not be initialized"))
    assert pair not in explain(RuntimeError("neuronx-cc failed with exit code 70"))
