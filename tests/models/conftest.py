"""A hub for the tests of what is downloaded (fakes/hub.py), and what children of source.py do without a child."""

import runpy
import sys
import traceback
import warnings
from pathlib import Path

import pytest
from fakes.hub import Hub, forget_connections
from huggingface_hub import constants, file_download

from models.checkpoint import source
from models.child import ChildError, run_module
from models.errors import ModelError
from run import ConfigError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with Hub() as hub:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in hub.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        # The library read its environment when it was imported.
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for module in (constants, file_download):  # 0.36 has it in both
            if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
                template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
                monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        forget_connections()
        yield hub
        forget_connections()


@pytest.fixture
def no_children(monkeypatch):
    """Checkpoints are read, written and checked in this process: a child imports transformers, which takes five seconds. The
    tests that start servers run real ones."""

    def run(arguments, **options):
        name = arguments[0]
        if not name.startswith("models."):  # pip
            return run_module(arguments, **options)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module may have been imported before
            patch.setattr(sys, "argv", arguments)
            try:
                runpy.run_module(name, run_name="__main__")
            except SystemExit as end:
                raise ChildError(1, str(end.code).splitlines()) from None
            except Exception as error:
                raise ChildError(1, traceback.format_exception_only(error)) from None

    def check(arguments, config):
        from models.checkpoint.architecture import read_architecture

        _check, folder = arguments
        try:
            read_architecture(config, Path(folder))
        except ModelError as error:
            raise ConfigError(str(error)) from None

    monkeypatch.setattr(source, "run_module", run)
    monkeypatch.setattr(source, "run_converter", check)
