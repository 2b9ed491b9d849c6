"""A page by Gradio for a running server, with two tabs.

    make run        the server, on http://localhost:8080
    make ui         this page, on http://localhost:7860; URL=http://host:port names another server

Chat streams from `POST /v1/chat/completions`. Infer sends each text by itself to `GET /infer?sentence=` and
shows what follows it, whole, as the Gradio app of the Ray Serve blueprint for Inferentia2 does; it needs no
chat template. Without make: `pip install ".[ui]"`, then `python deploy/gradio_app.py URL`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator

import gradio as gr
import httpx
from openai import AsyncOpenAI

MODEL = "default"  # the server takes any name
INFER_TIMEOUT_S = 600


def chat_tab(url: str, api_key: str | None) -> gr.ChatInterface:
    """As `gr.load_chat`, whose stop button does not close the connection: the server would generate the rest
    for nobody."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key or "none")

    async def chat(message: str, history: list[dict]) -> AsyncIterator[str]:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in history]
        messages.append({"role": "user", "content": message})
        text = ""
        async with await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True
        ) as stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                yield text

    return gr.ChatInterface(chat, api_name="chat", analytics_enabled=False)


def infer_tab(url: str, api_key: str | None) -> gr.ChatInterface:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def infer(sentence: str, _history: list[dict]) -> str:
        try:
            response = httpx.get(
                f"{url}/infer", params={"sentence": sentence}, headers=headers, timeout=INFER_TIMEOUT_S
            )
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise gr.Error(f"{url} does not answer: {error}") from None
        if response.status_code != 200:
            raise gr.Error(answer["error"])
        return answer[0].removeprefix(sentence).strip()

    return gr.ChatInterface(infer, api_name="infer", analytics_enabled=False)


def page(url: str, api_key: str | None = None) -> gr.TabbedInterface:
    """The page for the server at `url`, which may have a path (`/serve`, behind Ray Serve)."""
    url = url.rstrip("/")
    tabs = [chat_tab(url, api_key), infer_tab(url, api_key)]
    return gr.TabbedInterface(tabs, ["Chat", "Infer"], title="neuron-textgen", analytics_enabled=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serves a page by Gradio for a running server. API_KEY is the server's key."
    )
    parser.add_argument(
        "url", nargs="?", help="URL of the server (SERVICE_NAME). Default: http://localhost:8080."
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on. Default: 127.0.0.1.")
    parser.add_argument("--port", type=int, default=7860, help="Port to listen on. Default: 7860.")
    given = parser.parse_args()
    url = given.url or os.environ.get("SERVICE_NAME") or "http://localhost:8080"
    page(url, os.environ.get("API_KEY")).launch(
        server_name=given.host,
        server_port=given.port,
        show_error=True,  # the server's own words
        ssr_mode=False,
    )


if __name__ == "__main__":
    main()
