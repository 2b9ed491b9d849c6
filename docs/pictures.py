"""The pictures of the README and of links to it: a chat on the page at `/`, and a social card.

    make run MODEL=smollm2     # in another terminal
    .venv/bin/python docs/pictures.py http://localhost:8080

Needs chromium and chromedriver (apt install chromium chromium-driver). Writes docs/page.gif, docs/card.png.
"""

import html
import io
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "helpers")]

from chat_page import Page, chromium  # noqa: E402

QUESTION = "Write a short story about a robot who learns to paint."
SIZE = (840, 560)
FRAME_S = 0.1
CARD_SIZE = (1280, 640)  # GitHub's
NAME = "neuron-textgen"
CLAIM = "An LLM inference server for AWS Inferentia2, Trainium and CPUs"
APIS = "TGI · OpenAI · Anthropic · SageMaker · Vertex AI"
CARD = """<body style="margin:0;height:100vh;display:flex;flex-direction:column;justify-content:center;
font-family:system-ui,sans-serif;background:#14171b;color:#e6e9ec;padding:0 90px;box-sizing:border-box">
<div style="font-size:84px;font-weight:700">{}</div><div style="font-size:36px;margin:24px 0 56px">{}</div>
<div style="font-size:32px;color:#7db4ff">{}</div></body>"""


def resized(browser, size: tuple[int, int]) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def shot(browser) -> Image.Image:
    return Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")


def chat(browser, url: str) -> list[Image.Image]:
    """Frames of a chat, from the question to the end of the response."""
    page = Page(browser, url)
    page.ask(QUESTION, temperature=0, max_tokens=75)
    page.script("document.querySelector('#settings').open = false")
    frames = []
    while not page.find("#send")[0].is_displayed():
        frames.append(shot(browser))
        time.sleep(FRAME_S)
    return [*frames, shot(browser)]


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        browser = chromium(folder)
        try:
            resized(browser, SIZE)
            frames = chat(browser, url)
            resized(browser, CARD_SIZE)
            card = CARD.format(*map(html.escape, (NAME, CLAIM, APIS)))
            browser.get("data:text/html;charset=utf-8," + quote(card))
            shot(browser).save(HERE / "card.png", optimize=True)
        finally:
            browser.quit()
    few_colors = [frame.quantize(32) for frame in frames]
    durations = [int(FRAME_S * 1000)] * (len(frames) - 1) + [4000]
    few_colors[0].save(
        HERE / "page.gif",
        save_all=True,
        append_images=few_colors[1:],
        duration=durations,
        loop=0,
        optimize=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
