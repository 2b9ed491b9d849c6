"""A fresh Open WebUI as docs/agents.md starts it, in a real browser (Debian's chromium). Started by `make test-open-webui`."""

import contextlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from image_files import png
from scripted_server import Home, documented, needs_npm, serving_script, written_call

webdriver = pytest.importorskip("selenium.webdriver")
wait = pytest.importorskip("selenium.webdriver.support.wait")

pytestmark = [
    needs_npm(),
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")), reason="needs chromium and chromedriver"
    ),
    pytest.mark.timeout(600),
]

WAIT_S = 120
IN_RESULT, KNOWS = "current_iso", "It is xyzzy o clock."
IMAGE, SEES = "see-image", "A green square."
ALONE = {"HF_HUB_OFFLINE": "1", "OFFLINE_MODE": "true", "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "x"}


@contextlib.contextmanager
def chatting(folder, tokenizer, answers, image_word=""):
    """A browser that shows Open WebUI, whose server's model says `answers` (see `serving_script`)."""
    with (
        serving_script(folder, tokenizer, answers, image_word) as server,
        open_webui(server, Home(folder)) as page,
        chromium(folder) as browser,
    ):
        browser.get(page)
        wait.WebDriverWait(browser, WAIT_S).until(lambda _: browser.find_elements("css selector", "#chat-input"))
        # Closes the news of the version, if there are any.
        browser.execute_script(
            "[...document.querySelectorAll('button')].find((button) => /Let's Go/.test(button.innerText))?.click()"
        )
        yield browser


def open_webui(server, home):
    # The container finds this machine by another name.
    given = re.findall(r"-e (\w+)=(\S+)", documented("Open WebUI", server).replace("host.docker.internal:8080", server[7:]))
    command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port"]
    return home.serving(command, "/health", **dict(given), **ALONE, DATA_DIR=str(home.work))


@contextlib.contextmanager
def chromium(folder):
    options = webdriver.ChromeOptions()
    for argument in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={folder}/chromium"):
        options.add_argument(f"--{argument}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=shutil.which("chromedriver")))
    browser.set_window_size(1200, 900)
    yield browser
    browser.quit()


def ask(browser, text):
    field = browser.find_element("css selector", "#chat-input")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys(text + "\n")


def wait_for_text(browser, text):
    return wait.WebDriverWait(browser, WAIT_S).until(lambda _: text in browser.find_element("css selector", "body").text, text)


def test_a_fresh_one_runs_a_tool_and_shows_the_answer(tmp_path):
    """The chat template has no place for tools, which it sends with the first request, and raises for two users in a row."""
    answers = {"use-webui": written_call("gemma3", "get_current_timestamp"), IN_RESULT: KNOWS}
    with chatting(tmp_path, "gemma3", answers) as browser:
        ask(browser, "Please use-webui")
        wait_for_text(browser, KNOWS)
        assert "View Result from get_current_timestamp" in browser.find_element("css selector", "body").text


def test_it_sends_an_image_that_the_model_sees(tmp_path):
    picture = tmp_path / "picture.png"
    picture.write_bytes(png(320, 240))
    with chatting(tmp_path, "qwen2_5", {IMAGE: SEES}, image_word=IMAGE) as browser:
        browser.find_element("css selector", "input[type=file]").send_keys(str(picture))
        shown = "img[src^='data:image'], img[src*='/files/']"
        wait.WebDriverWait(browser, WAIT_S).until(lambda _: browser.find_elements("css selector", shown))
        ask(browser, "What is this?")
        wait_for_text(browser, SEES)
