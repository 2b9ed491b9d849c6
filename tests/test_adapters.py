"""LoRA adapters through a real server of four processes: each request gets the text of the model with its own adapter."""

import concurrent.futures
import json
import os
import signal
import threading

import pytest
import torch
from fakes.hub import Hub
from processes import WAIT_S, Server, wait_until
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from wrong_adapters import written, wrong_adapters

from config import DEMO_MODEL

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

NAMES = ("french", "owner.sql", "third")
QUESTION = "What is Deep Learning?"
TOKENS = 12
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def made(folder, seed):
    """Writes a random adapter of the demonstration model. Returns what that generates with it, in float32."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if folder and name.endswith(("q_proj", "v_proj", "gate_proj")):
            down = torch.randn(4, layer.in_features, generator=generator) * layer.in_features**-0.5
            up = torch.randn(layer.out_features, 4, generator=generator) * 0.2
            layer.weight.data += 2 * up @ down
            tensors |= {
                f"base_model.model.{name}.lora_{kind}.weight": tensor.contiguous() for kind, tensor in zip("AB", (down, up))
            }
    if folder:
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(folder):
    """Token ids by the adapter's name."""
    texts = {name: made(name and folder / name, seed) for seed, name in enumerate(["", *NAMES])}
    assert len(set(map(tuple, texts.values()))) == len(texts)
    return texts


class ServerWithKey(Server):
    def request(self, method, path, body=None, **headers):
        return super().request(method, path, body, **{"Authorization": "Bearer secret"} | headers)


@pytest.fixture(scope="module")
def server(folder, expected):
    adapters = ",".join(f"{name}={folder / name}" for name in NAMES)
    flags = ["--lora-folder", str(folder), "--api-key", "secret", "--web-concurrency", "2"]
    with ServerWithKey("--lora-adapters", adapters, *flags) as server:
        yield server.wait_ready()
        server.wait_idle()
        assert server.stop() == 0


def ids(server, adapter):
    _status, answer = server.generate(QUESTION, max_new_tokens=TOKENS, details=True, adapter_id=adapter)
    return [token["id"] for token in answer["details"]["tokens"]]


def test_a_crowd_of_requests_with_all_adapters_gets_the_texts_of_each(server, expected):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        asked = ["", *NAMES] * 6
        for name, found in zip(asked, threads.map(lambda name: ids(server, name), asked)):
            assert found == expected[name]
    counts = [f'tgi_adapter_requests{{adapter="{name}"}} ' for name in NAMES]
    wait_until(lambda: all(count in server.get("/metrics")[1] for count in counts), "metrics of each adapter")
    assert "LoRA adapters: french, owner.sql, third; " in server.log


def test_every_api_answers_with_the_adapter_that_was_named(server):
    def asked(path, body, **headers):
        response = server.request("POST", path, body, **headers)
        return response.status, json.loads(response.read())

    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0}
    whole = {name: server.post("/v1/chat/completions", chat | {"model": name}) for name in NAMES}
    texts = {name: answer["choices"][0]["message"]["content"] for name, answer in whole.items()}
    assert [answer["model"] for answer in whole.values()] == list(NAMES) and len(set(texts.values())) == 3
    for name in NAMES:
        several = server.post("/v1/chat/completions", chat | {"model": name, "n": 3})["choices"]
        assert [choice["message"]["content"] for choice in several] == [texts[name]] * 3
        message = server.post("/v1/messages", chat | {"model": name})
        assert (message["model"], message["content"][0]["text"]) == (name, texts[name])
        asked_of = {"input": QUESTION, "max_output_tokens": TOKENS, "temperature": 0, "model": name}
        response = server.post("/v1/responses", asked_of)
        assert (response["model"], response["output"][0]["content"][0]["text"]) == (name, texts[name])
        status, invoked = asked("/invocations", chat, **{HEADER: name})
        assert (status, invoked["model"], invoked["choices"][0]["message"]["content"]) == (200, name, texts[name])
    assert asked("/v1/chat/completions", chat | {"model": "German"})[0] == 404
    assert asked("/v1/messages", chat | {"model": "German"})[0] == 404
    assert asked("/invocations", chat, **{HEADER: "German"})[0] == 404
    assert asked("/generate", {"inputs": QUESTION, "parameters": {"adapter_id": "German"}})[0] == 422


def test_an_adapter_comes_and_goes_while_others_run_and_no_request_is_lost(server, expected):
    def change(path, **body):
        response = server.request("POST", f"/v1/{path}", body)
        return response.status, response.read().decode()

    late = expected["third"]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asked = ["", *NAMES] * 12
        running = [threads.submit(ids, server, name) for name in asked]
        for _ in range(5):
            loaded = change("load_lora_adapter", lora_name="late", lora_path="third")
            assert loaded == (200, "Success: LoRA adapter 'late' added successfully.")
            assert ids(server, "late") == late
            unloaded = change("unload_lora_adapter", lora_name="late")
            assert unloaded == (200, "Success: LoRA adapter 'late' removed successfully.")
            assert server.generate(QUESTION, adapter_id="late")[0] == 422
        for name, found in zip(asked, running):
            assert found.result() == expected[name]
    refused = server.request("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "third"}, Authorization="")
    assert refused.status == 401
    assert "No such file" not in server.log and "Loaded the LoRA adapter late" in server.log


def test_a_server_stops_while_an_adapter_is_downloaded(tmp_path):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(1000)}
    flags = ["--lora-folder", str(tmp_path), "--api-key", "secret", "--graceful-termination-timeout", "1000"]
    with Hub() as hub, ServerWithKey(*flags, **hub.environment(tmp_path)) as server:
        hub.push("someone/adapter", files)
        hub.fail("adapter_model.safetensors", "hang", times=100)
        server.wait_ready()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            body = {"lora_name": "late", "lora_path": "someone/adapter"}
            loading = threads.submit(server.request, "POST", "/v1/load_lora_adapter", body)
            assert hub.hangs.wait(WAIT_S)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit(30) == 0  # the hub hangs for longer
            assert loading.result().status == 503


# One of each kind: refused by its shapes, by its child too late, by the model, in a long line, and by its files.
THROUGH_A_SERVER = ("rank 17", "redos", "other outputs", "long", "FIFO")


def test_adapters_that_cannot_be_loaded_are_named_in_one_line_while_others_get_their_texts(server, folder, expected):
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        stopped = threading.Event()

        def ask(name):
            found = []
            while not stopped.wait(0.2):  # the processes that read adapters need the processor, too
                found.append(ids(server, name))
            return found

        asking = {name: threads.submit(ask, name) for name in ("", *NAMES)}
        try:
            size = AutoConfig.from_pretrained(DEMO_MODEL).hidden_size
            wrong = {name: said for name, said in wrong_adapters(folder, size) if name in THROUGH_A_SERVER}
            assert len(wrong) == len(THROUGH_A_SERVER)
            for name, said in wrong.items():
                body = {"lora_name": "wrong", "lora_path": name}
                response = server.request("POST", "/v1/load_lora_adapter", body)
                answer = json.loads(response.read())["error"]["message"]
                assert (response.status, said in answer) == (400, True), (name, answer)
                assert answer.isprintable() and len(answer) < 350, name
        finally:
            stopped.set()
        for name, texts in asking.items():
            assert texts.result() == [expected[name]] * len(texts.result())
    assert server.get("/health")[0] == 200 and "wrong" not in [
        card["id"] for card in json.loads(server.get("/v1/models")[1])["data"]
    ]


def test_a_child_that_the_system_ends_is_not_the_clients_fault(server, folder):
    written(
        folder / "ended",
        {},
        {"base_model.model.lora_A.weight": torch.zeros(1, 1), "base_model.model.lora_B.weight": torch.zeros(1, 1)},
    )
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        body = {"lora_name": "ended", "lora_path": "ended"}
        loading = threads.submit(server.request, "POST", "/v1/load_lora_adapter", body)
        child = wait_until(
            lambda: [pid for pid, command in server.processes() if "models.checkpoint.lora" in command], "a child"
        )
        os.kill(child[0], signal.SIGKILL)
        response = loading.result()
        said = "reading the LoRA adapter ended failed: the process was ended by SIGKILL"
        assert response.status == 503 and said in json.loads(response.read())["error"]["message"]
