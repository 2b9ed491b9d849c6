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
    """Streams the words of a chat: two, and the others when `may_go_on` is set. Knows when the client disconnects."""

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
        for word in ("One", " two"):
            self.send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": word}}]})
        while not self.server.may_go_on.wait(0.05):
            try:
                self.send({"choices": []})
            except OSError:
                self.server.is_left.set()
                return
        self.send({"choices": [{"index": 0, "delta": {"content": " three."}, "finish_reason": "stop"}]})

    def send(self, event):
        self.wfile.write(b"data: %s\n\n" % json.dumps(event).encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def gradio(*arguments, **environment):
    """The URL of the app, as a user starts it."""
    port = free_port()
    command = [sys.executable, "deploy/gradio_app.py", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env={"PATH": "/usr/bin", "HOME": "/nowhere", **environment})
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.fixture(scope="module")
def slow():
    server = SlowServer()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def urls(slow):
    """Of the app in front of the real server, of the one in front of the slow server, and of one whose key is wrong."""
    with contextlib.ExitStack() as started:
        url = started.enter_context(serving(API_KEY=KEY))
        apps = {"real": gradio(SERVICE_NAME=url, API_KEY=KEY), "slow": gradio(slow.url), "wrong": gradio(url, API_KEY="wrong")}
        yield {name: started.enter_context(app) for name, app in apps.items()}


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
        def opened():
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(urls[name], timeout=WAIT_S).status == 200

        wait_until(opened, "the app")
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
    wait_until(lambda: page.said("bot") == ["One two"], "the first words")
    slow.may_go_on.set()
    wait_until(lambda: page.said("bot") == ["One two three."], "the others")


def test_a_chat_that_is_stopped_leaves_the_server(opens, slow):
    slow.may_go_on.clear()
    slow.is_left.clear()
    page = opens("slow")
    page.ask(QUESTION)
    wait_until(lambda: page.said("bot") == ["One two"], "the first words")
    page.wait_for("[data-testid=stop-button]").click()
    assert slow.is_left.wait(WAIT_S)
    assert page.said("bot") == ["One two"]


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
