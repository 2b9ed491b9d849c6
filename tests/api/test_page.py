"""The pages for people, in a real browser (Debian's chromium), against the real server with the demonstration model."""

import json
import shutil

import pytest
from processes import Server, wait_until

pytestmark = pytest.mark.processes
webdriver = pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("needs chromium and chromedriver (apt install chromium chromium-driver)", allow_module_level=True)

KEY = "the-key"


@pytest.fixture(scope="module")
def server():
    with Server(API_KEY=KEY) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    quiet = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking")
    for argument in (*quiet, "no-first-run", "window-size=420,800", f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


@pytest.fixture
def page(browser, server):
    browser.get(f"http://127.0.0.1:{server.port}/")
    yield Page(browser)
    severe = [entry["message"] for entry in browser.get_log("browser") if "favicon" not in entry["message"]]
    assert [message for message in severe if "Content Security Policy" in message or "TypeError" in message] == []


class Page:
    def __init__(self, browser):
        self.browser = browser

    def find(self, selector):
        return self.browser.find_elements("css selector", selector)

    def type(self, name, text):
        (field,) = self.find(f"#{name}")
        self.browser.execute_script("arguments[0].closest('details')?.setAttribute('open', '')", field)
        field.clear()
        field.send_keys(text)

    def ask(self, text, key=KEY, **settings):
        for name, value in (settings | {"key": key}).items():
            self.type(name, str(value))
        self.type("prompt", text + "\n")

    def wait_for(self, selector):
        (last, *_) = reversed(wait_until(lambda: self.find(selector), selector))
        return last

    def is_done(self):
        return self.find("#send")[0].is_displayed()


def test_a_chat_streams_its_answer_and_tells_its_speed(page, server):
    page.ask("What is Deep Learning?", temperature=0, max_tokens=12)
    page.wait_for(".figures")
    wait_until(page.is_done, "the end")
    body = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "temperature": 0, "max_tokens": 12}
    response = server.request("POST", "/v1/chat/completions", body, Authorization=f"Bearer {KEY}")
    expected = json.loads(response.read())["choices"][0]["message"]["content"]
    assert page.find("article.assistant div")[0].text == expected.strip()
    assert "first token after" in page.find(".figures")[0].text and "12 tokens" in page.find(".figures")[0].text
    page.ask("Go on.", temperature=0, max_tokens=5)
    wait_until(lambda: len(page.find(".figures")) == 2, "a second answer")
    assert page.find("h1")[0].text == "neuron-textgen/demo"


# Clicks as soon as there is text: the driver of the browser may be slower than the answer.
CLICK_STOP = """
const click = () => document.querySelector("article.assistant div")?.textContent && document.querySelector("#stop").click()
new MutationObserver(click).observe(document.body, {childList: true, subtree: true, characterData: true})
"""


def test_an_answer_can_be_stopped(page, server):
    page.browser.execute_script(CLICK_STOP)
    page.ask("Tell me everything.", temperature=5, max_tokens=900)  # random text rarely ends by itself
    assert "stopped" in page.wait_for(".figures").text
    server.wait_idle()


def test_an_answer_has_the_form_of_the_schema_that_is_given(page):
    schema = {"type": "object", "properties": {"city": {"enum": ["Tartu", "Pärnu"]}}, "required": ["city"]}
    page.ask("Which city?", schema=json.dumps(schema, ensure_ascii=False), temperature=0)
    page.wait_for(".figures")
    wait_until(page.is_done, "the end")
    assert json.loads(page.find("article.assistant div")[0].text)["city"] in ("Tartu", "Pärnu")


@pytest.mark.parametrize(
    ("given", "problem"), [('{"type": "object"', "The schema is not valid JSON: "), ("[1]", "A JSON schema is an object: {…}")]
)
def test_a_schema_that_is_none_is_described_and_nothing_is_sent(page, given, problem):
    page.ask("Which city?", schema=given)
    (described,) = page.find("#schema-error")
    assert described.is_displayed() and described.text.startswith(problem)
    (field,) = page.find("#schema")
    assert page.browser.switch_to.active_element == field
    assert (field.get_attribute("aria-invalid"), field.get_attribute("aria-describedby")) == ("true", "schema-error")
    assert page.find("article") == [] and page.find("#prompt")[0].get_property("value") == "Which city?"
    page.type("schema", " ")
    page.type("prompt", "")
    assert not described.is_displayed()


def test_errors_of_the_server_are_shown_in_its_words(page):
    page.ask("Hi", max_tokens=100_000)
    assert "maximum context length" in page.wait_for("article.error div").text


def test_without_the_key_the_page_opens_and_says_that_one_is_needed(page):
    page.ask("Hi", key="wrong")
    assert "API key" in page.wait_for("article.error div").text


def test_the_api_page_shows_the_routes(browser, server):
    browser.get(f"http://127.0.0.1:{server.port}/docs/")
    wait_until(lambda: len(browser.find_elements("css selector", ".opblock")) > 10, "the routes")
