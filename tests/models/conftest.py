"""A hub for the tests of what is downloaded. See fakes/hub.py."""

import pytest
from fakes.hub import Hub, forget_connections
from huggingface_hub import constants, file_download


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
