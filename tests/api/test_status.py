"""Health, metrics and the page: what a web process tells of itself while the worker boots, hangs or is gone."""

import html
import re

import msgspec
import pytest
from served import WINDOW, wait_until

from config import VERSION
from models.errors import progress_logged
from text.output.call_syntaxes import ModelTools
from text.output.tool_formats import HERMES


def test_before_the_model_is_ready_everything_says_what_is_going_on(booting):
    wait_until(lambda: booting.seen.phase == "starting")
    assert booting.client.get("/live").status_code == 200
    health = booting.client.get("/health")
    assert health.status_code == 503
    assert health.json == {"error": "unhealthy", "error_type": "healthcheck", "phase": "starting"}
    assert health.headers["Retry-After"] == "5"
    refused = booting.post("/generate", {"inputs": "a"})
    assert refused.status_code == 503
    assert refused.json["phase"] == "starting"
    assert int(refused.headers["Retry-After"]) > 0
    for method in ("GET", "DELETE"):  # stored responses need no model
        assert booting.client.open("/v1/responses/resp_1", method=method).status_code == 404


def test_health_says_what_takes_long_before_the_model_is_ready(booting):
    with progress_logged("downloading it"):
        wait_until(lambda: booting.client.get("/health").json.get("progress") == "downloading it")
    wait_until(lambda: "progress" not in booting.client.get("/health").json)


def test_the_version_is_told(served):
    assert served.client.get("/version").json == {"version": VERSION}


def test_metrics_are_there_while_the_device_stands_still_and_before_it_is_ready(booting):
    assert "tgi_request_count 0.0" in booting.client.get("/metrics").get_data(as_text=True)
    booting.get_ready()
    booting.model.may_decode.clear()
    stream = booting.post("/generate_stream", {"inputs": "Hello"}, buffered=False)
    assert booting.counts()["tgi_slots_busy"] == 1
    booting.model.may_decode.set()
    stream.close()


def test_without_a_worker_there_are_no_metrics_and_it_is_told(booting):
    booting.get_ready()
    booting.link.close()
    wait_until(lambda: booting.seen.phase == "dead")
    assert booting.client.get("/metrics").status_code == 503


def attributes(served):
    """The body's, as the page's scripts see them."""
    shown = served.client.get("/", headers={"Accept": "text/html"}).get_data(as_text=True)
    (body,) = re.findall("<body(.*)>", shown)
    return {name: html.unescape(value) for name, value in re.findall(' data-([a-z]+)="([^"]*)"', body)}


@pytest.mark.parametrize(("is_chat", "reads_images"), [(True, False), (False, False), (True, True), (False, True)])
def test_the_page_knows_the_model_and_whether_it_has_chats_and_reads_images_there(booting, is_chat, reads_images):
    if not is_chat:
        (booting.folder / "chat_template.jinja").unlink()
    assert attributes(booting) == {"preparing": booting.config.model_name}
    booting.get_ready()
    booting.seen.info = msgspec.structs.replace(booting.seen.info, reads_images=reads_images, quantize="int8")
    facts = {"model": "m", "context": str(WINDOW), "precision": "int8", "device": "fake", "sampling": "host"}
    capabilities = {"chats": is_chat, "images": reads_images}
    assert attributes(booting) == facts | {name: "True" for name, holds in capabilities.items() if holds}


@pytest.mark.parametrize(("form", "in_prompt", "told"), [(HERMES, False, "hermes"), (HERMES, True, None), (None, False, None)])
def test_the_page_knows_whether_the_models_own_template_has_tools_whose_calls_are_read(served, form, in_prompt, told):
    served.seen.text = served.seen.text._replace(tools=ModelTools(form, in_prompt=in_prompt))
    assert attributes(served).get("tools") == told


def test_no_name_of_a_model_becomes_markup(serve):
    name = 'it\'s <b>"mine"</b>'
    served = serve(served_model_name=name)
    assert attributes(served) == {"preparing": name}


@pytest.mark.parametrize("keys", [{"api_key": "secret"}, {"api_key_file": "keys"}])
def test_the_page_knows_that_a_key_is_needed_and_not_which(serve, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("secret\n")
    shown = serve(**keys).get_ready().client.get("/", headers={"Accept": "text/html"}).get_data(as_text=True)
    assert ' data-key="True">' in shown and "secret" not in shown


def test_the_page_loads_nothing_from_elsewhere_and_can_be_left_out(serve):
    browser = {"Accept": "text/html"}
    shown = serve().client.get("/", headers=browser)
    assert shown.mimetype == "text/html"
    assert "default-src 'none'; script-src 'self'" in shown.headers["Content-Security-Policy"]
    hidden = serve(no_web_page=True).client
    assert hidden.get("/page/chat.js").status_code == 404
    assert hidden.get("/", headers=browser).mimetype != "text/html"
