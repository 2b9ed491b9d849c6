"""A page by Gradio for a running server, with two tabs.

    python deploy/gradio_app.py http://localhost:8080     serves it on http://localhost:7860

Chat streams from `POST /v1/chat/completions`. Infer sends each text alone to `GET /infer?sentence=` and shows the continuation,
as the Gradio app of the Ray Serve blueprint for Inferentia2 does; it needs no chat template. Needs the packages of the extra
`ui` (`pip install ".[ui]"`).
"""

from __future__ import annotations

import argparse
import os

import gradio as gr
import httpx

MODEL = "default"  # the server accepts any name
INFER_TIMEOUT_S = 600


def chat_tab(url: str, api_key: str | None) -> gr.ChatInterface:
    return gr.load_chat(f"{url}/v1", MODEL, token=api_key or "none", title=None, api_name="chat")


def infer_tab(url: str, api_key: str | None) -> gr.ChatInterface:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def infer(sentence: str, _history: list[dict]) -> str:
        try:
            response = httpx.get(f"{url}/infer", params={"sentence": sentence}, headers=headers, timeout=INFER_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise gr.Error(f"{url} does not answer: {error}") from None
        answer = response.json()
        if response.status_code != 200:
            raise gr.Error(answer["error"])
        return answer[0].removeprefix(sentence).strip()

    return gr.ChatInterface(infer, api_name="infer")


def page(url: str, api_key: str | None = None) -> gr.Blocks:
    """The page for the server at `url`, which may have a path (`/serve`, behind Ray Serve)."""
    url = url.rstrip("/")
    return gr.TabbedInterface([chat_tab(url, api_key), infer_tab(url, api_key)], ["Chat", "Infer"], title="neuron-textgen")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a chat page for a running server.")
    parser.add_argument("url", nargs="?", default=os.environ.get("SERVICE_NAME", "http://localhost:8080"),
        help="URL of the server. Default: the variable SERVICE_NAME, else http://localhost:8080.")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on. Default: 127.0.0.1.")
    parser.add_argument("--port", type=int, default=7860, help="Port to listen on. Default: 7860.")
    arguments = parser.parse_args()
    app = page(arguments.url, os.environ.get("API_KEY"))
    app.launch(server_name=arguments.host, server_port=arguments.port, analytics_enabled=False)


if __name__ == "__main__":
    main()
