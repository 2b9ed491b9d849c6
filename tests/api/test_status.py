"""Health, metrics and the page: what a web process tells of itself while the worker boots, hangs or is gone."""

import msgspec
import pytest
from served import WINDOW, wait_until

from config import VERSION


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


@pytest.mark.parametrize(("is_chat", "reads_images"), [(True, False), (False, False), (True, True), (False, True)])
def test_the_page_knows_the_model_and_whether_it_has_chats_and_reads_images_there(booting, is_chat, reads_images):
    if not is_chat:
        (booting.folder / "chat_template.jinja").unlink()
    browser = {"Accept": "text/html"}
    assert "<body>" in booting.client.get("/", headers=browser).get_data(as_text=True), "it is not known yet"
    booting.get_ready()
    booting.seen.info = msgspec.structs.replace(booting.seen.info, reads_images=reads_images)
    shown = booting.client.get("/", headers=browser).get_data(as_text=True)
    images = is_chat and reads_images
    chats = str(is_chat).lower()
    expected = f'<body data-model="m" data-chats="{chats}" data-images="{str(images).lower()}" data-context="{WINDOW}">'
    assert expected in shown


@pytest.mark.parametrize("keys", [{"api_key": "secret"}, {"api_key_file": "keys"}])
def test_the_page_knows_that_a_key_is_needed_and_not_which(serve, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("secret\n")
    shown = serve(**keys).get_ready().client.get("/", headers={"Accept": "text/html"}).get_data(as_text=True)
    assert ' data-key="true">' in shown and "secret" not in shown


def test_the_page_loads_nothing_from_elsewhere_and_can_be_left_out(serve):
    browser = {"Accept": "text/html"}
    shown = serve().client.get("/", headers=browser)
    assert shown.mimetype == "text/html"
    assert "default-src 'none'; script-src 'self'" in shown.headers["Content-Security-Policy"]
    hidden = serve(no_web_page=True).client
    assert hidden.get("/page/chat.js").status_code == 404
    assert hidden.get("/", headers=browser).mimetype != "text/html"
