"""deploy/gradio_app.py in a real browser (Debian's chromium). Started by `make test-ui`."""

import contextlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from demo_server import ANSWER, QUESTION, ROOT, free_port, serving

sys.path.append(str(ROOT / "deploy"))
import gradio_app

webdriver = pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("needs chromium and chromedriver (apt install chromium chromium-driver)", allow_module_level=True)

WAIT_S = 90
KEY = "the-key"


def wait_until(holds, what):
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what}: did not happen"
        time.sleep(0.02)
    return found


class SlowServer(http.server.ThreadingHTTPServer):
    """Streams a chat slowly, until `may_go_on` is set. Knows when the client disconnects."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Chat)
        self.may_go_on, self.is_left = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Chat(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.send("One", role="assistant")
            while not self.server.may_go_on.wait(0.05):
                self.send(" more")
            self.send(" last.")
        except OSError:
            self.server.is_left.set()

    def send(self, content, **delta):
        event = {"choices": [{"index": 0, "delta": {"content": content, **delta}}]}
        self.wfile.write(b"data: %s\n\n" % json.dumps(event).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def slow():
    server = SlowServer()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def urls(slow):
    """Of the app in front of the real server, as a user starts it, in front of the slow server, and with a wrong key."""
    port = free_port()
    command = [sys.executable, "deploy/gradio_app.py", "--port", str(port)]
    with serving(API_KEY=KEY) as url:
        process = subprocess.Popen(command, cwd=ROOT, env={"PATH": "/usr/bin", "SERVICE_NAME": url, "API_KEY": KEY})
        pages = [gradio_app.page(slow.url), gradio_app.page(url, "wrong")]
        others = [page.launch(prevent_thread_lock=True, show_error=True, quiet=True)[1] for page in pages]
        real = f"http://127.0.0.1:{port}/"
        wait_until(lambda: answers(real), "the app")
        yield dict(zip(("real", "slow", "wrong"), (real, *others)))
        process.terminate()
        process.wait(WAIT_S)
        for page in pages:
            page.close(verbose=False)


def answers(url):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=WAIT_S).status == 200


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1000,900"):
        options.add_argument(f"--{argument}")
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()


@pytest.fixture
def opens(browser, urls):
    def page(name):
        browser.get(urls[name])
        return Page(browser)

    return page


class Page:
    def __init__(self, browser):
        self.browser = browser

    def shown(self, selector):
        return [found for found in self.browser.find_elements("css selector", selector) if found.is_displayed()]

    def wait_for(self, selector):
        return wait_until(lambda: self.shown(selector), selector)[0]

    def choose(self, tab):
        wait_until(lambda: [found for found in self.shown("[role=tab]") if found.text == tab], tab)[0].click()

    def ask(self, text):
        self.wait_for("textarea:enabled").send_keys(text + "\n")

    def said(self, by):
        return [message.text for message in self.shown(f"[data-testid={by}]")]

    def wait_for_answers(self, count):
        wait_until(lambda: len(self.said("bot")) == count and all(self.said("bot")), f"{count} answers")
        self.wait_for("[data-testid=submit-button]")  # in the place of the stop button
        return self.said("bot")


def test_a_chat_of_two_turns_is_answered(opens):
    page = opens("real")
    page.ask(QUESTION)
    assert len(page.wait_for_answers(1)[0].split()) > 3
    page.ask("Go on.")
    page.wait_for_answers(2)
    assert page.said("user") == [QUESTION, "Go on."]


def test_words_are_shown_as_they_come(opens, slow):
    slow.may_go_on.clear()
    page = opens("slow")
    page.ask(QUESTION)
    wait_until(lambda: page.said("bot") and page.said("bot")[0].startswith("One more more"), "the first words")
    assert "last" not in page.said("bot")[0]
    slow.may_go_on.set()
    wait_until(lambda: page.said("bot")[0].endswith("more last."), "the others")


def test_a_chat_that_is_stopped_disconnects_from_the_server(opens, slow):
    slow.may_go_on.clear()
    slow.is_left.clear()
    page = opens("slow")
    page.ask(QUESTION)
    page.wait_for("[data-testid=stop-button]").click()
    assert slow.is_left.wait(WAIT_S)


def test_the_tab_infer_shows_what_follows_the_sentence(opens):
    page = opens("real")
    page.choose("Infer")
    page.ask(QUESTION)
    assert page.wait_for_answers(1) == [ANSWER.strip()]


@pytest.mark.parametrize("tab", ["Chat", "Infer"])
def test_an_error_is_shown_in_the_words_of_the_server(opens, tab):
    page = opens("wrong")
    page.choose(tab)
    page.ask(QUESTION)
    wait_until(lambda: "requires its API key" in page.wait_for(".toast-body").text, "the error")


def test_the_page_loads_nothing_from_elsewhere(opens):
    page = opens("real")
    page.wait_for("textarea")
    hosts = "return performance.getEntriesByType('resource').map(entry => new URL(entry.name).hostname)"
    assert set(page.browser.execute_script(hosts)) == {"127.0.0.1"}
