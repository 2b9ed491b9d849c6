"""A fresh Open WebUI as docs/agents.md starts it, in a real browser (Debian's chromium). Started by `make test-open-webui`.

The chat template has no place for tools, which Open WebUI sends with the first request, and raises for two users in a row.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest
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
TOKENIZER = "gemma3"
IN_RESULT, KNOWS = "current_iso", "It is xyzzy o clock."
ALONE = {"HF_HUB_OFFLINE": "1", "OFFLINE_MODE": "true", "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "x"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    answers = {"use-webui": written_call(TOKENIZER, "get_current_timestamp"), IN_RESULT: KNOWS}
    with serving_script(tmp_path_factory.mktemp("model"), TOKENIZER, answers) as url:
        yield url


@pytest.fixture(scope="module")
def page(server, folder):
    """The URL of Open WebUI."""
    # The container finds this machine by another name.
    given = re.findall(r"-e (\w+)=(\S+)", documented("Open WebUI", server).replace("host.docker.internal:8080", server[7:]))
    command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port"]
    with folder.serving(command, "/health", **dict(given), **ALONE, DATA_DIR=str(folder.work)) as url:
        yield url


@pytest.fixture(scope="module")
def browser(page, folder):
    options = webdriver.ChromeOptions()
    for argument in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={folder.home}/chromium"):
        options.add_argument(f"--{argument}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=shutil.which("chromedriver")))
    browser.set_window_size(1200, 900)
    yield browser
    browser.quit()


def wait_for_text(browser, text):
    return wait.WebDriverWait(browser, WAIT_S).until(lambda _: text in browser.find_element("css selector", "body").text, text)


def test_a_fresh_one_runs_a_tool_and_shows_the_answer(browser, page):
    browser.get(page)
    field = wait.WebDriverWait(browser, WAIT_S).until(lambda _: browser.find_elements("css selector", "#chat-input"))[0]
    for button in browser.find_elements("css selector", "button"):
        if button.text.strip() == "Okay, Let's Go!":  # news of the version
            button.click()
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys("Please use-webui\n")
    wait_for_text(browser, KNOWS)
    assert "View Result from get_current_timestamp" in browser.find_element("css selector", "body").text
