"""The pages for people, in a real browser (Debian's chromium): against the real server with the demonstration model, and
against one whose answers the test writes."""

import ast
import base64
import io
import json
import re
import shlex
import shutil
import subprocess
import time

import pytest
from chat_page import Page, chromium, webdriver
from fakes.chat_server import ChatServer
from fakes.hub import Hub
from PIL import Image
from processes import Server, wait_until

from config import DEMO_MODEL
from run import HERE

pytestmark = pytest.mark.processes

KEY = "the-key"
OWN = "article.user .text"
SOME = "article.assistant .text"
PROBLEM = "article.error .text"
SMALL = {"width": 360, "height": 760, "deviceScaleFactor": 1, "mobile": False}  # a screen


@pytest.fixture(scope="module")
def server():
    with Server(API_KEY=KEY) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def scripted():
    with ChatServer() as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = chromium(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser, server):
    """The page of the real server."""
    page = Page(browser, f"http://127.0.0.1:{server.port}/")
    yield page
    assert page.violations() == []


@pytest.fixture
def chat(browser, scripted):
    """The page of the server whose answers the test writes."""
    page = Page(browser, scripted.url, scripted.answers)
    yield page
    assert page.violations() == []


def test_a_chat_streams_its_answer_and_tells_its_speed(page, server):
    page.ask("What is Deep Learning?", key=KEY, temperature=0, max_tokens=12)
    page.wait_for_end()
    body = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "temperature": 0, "max_tokens": 12}
    response = server.request("POST", "/v1/chat/completions", body, Authorization=f"Bearer {KEY}")
    expected = json.loads(response.read())["choices"][0]["message"]["content"]
    assert page.texts(SOME) == [expected.strip()]
    (figures,) = page.texts(".figures")
    assert "tokens/s, first token after" in figures
    assert "12 tokens, stopped: max tokens" in figures
    assert page.texts("h1") == ["neuron-textgen/demo"]


def test_the_settings_that_are_filled_in_reach_the_request_and_no_others(chat):
    settings = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 7, "seed": 42}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chat.ask("Hello", **settings)
    answer = chat.next_answer()
    answer.end()
    chat.wait_for_end()
    assert answer.body == {"messages": [{"role": "user", "content": "Hello"}]} | stream | settings
    for name in settings:
        chat.type(name, "")
    chat.ask("Again")
    answer = chat.next_answer()
    answer.end()
    chat.wait_for_end()
    assert answer.body.keys() == {"messages", *stream}


def test_a_model_without_a_chat_template_continues_texts(browser, scripted):
    page = Page(browser, scripted.url_of["without-chats.html"], scripted.answers)
    assert page.texts("#prompt-label") == ["Text to continue"]
    assert not page.find("#system")[0].is_displayed()
    page.ask("Once upon")
    answer = page.next_answer()
    assert (answer.path, answer.body["prompt"]) == ("/v1/completions", "Once upon") and "messages" not in answer.body
    answer.write_text(" a time")
    answer.end()
    page.wait_for_end()
    assert page.texts(SOME) == ["a time"]
    assert page.violations() == []


# Clicks as soon as there is text: the driver of the browser may be slower than the answer.
CLICK_STOP = """
const click = () => document.querySelector("article.assistant .text")?.textContent && document.querySelector("#stop").click()
new MutationObserver(click).observe(document.body, {childList: true, subtree: true, characterData: true})
"""


def test_an_answer_can_be_stopped(page, server):
    page.script(CLICK_STOP)
    for _attempt in range(50):  # random text may end by itself before
        page.ask("Tell me everything.", key=KEY, temperature=5, max_tokens=900)
        page.wait_for_end()
        if "stopped" in page.texts(".figures")[-1]:
            break
    assert "stopped" in page.texts(".figures")[-1]
    server.wait_idle()


def test_an_answer_has_the_form_of_the_schema_that_is_given(page):
    schema = {"type": "object", "properties": {"city": {"enum": ["Tartu", "Pärnu"]}}, "required": ["city"]}
    page.ask("Which city?", key=KEY, schema=json.dumps(schema, ensure_ascii=False), temperature=0)
    page.wait_for_end()
    assert json.loads(page.texts(SOME)[0])["city"] in ("Tartu", "Pärnu")


@pytest.mark.parametrize(
    ("given", "problem"), [('{"type": "object"', "The schema is not valid JSON: "), ("[1]", "A JSON schema is an object: {…}")]
)
def test_a_schema_that_is_none_is_described_and_nothing_is_sent(chat, given, problem):
    chat.ask("Which city?", schema=given)
    (described,) = chat.find("#schema-error")
    assert described.is_displayed() and described.text.startswith(problem)
    (field,) = chat.find("#schema")
    assert chat.browser.switch_to.active_element == field
    assert (field.get_attribute("aria-invalid"), field.get_attribute("aria-describedby")) == ("true", "schema-error")
    assert chat.find("article") == [] and chat.field == "Which city?"
    chat.type("schema", " ")
    chat.type("prompt", "")
    assert not described.is_displayed()


def test_errors_of_the_server_are_shown_in_its_words(page):
    page.ask("Hi " * 2000, key=KEY)
    assert "maximum context length" in page.wait_for(PROBLEM).text


def test_without_the_key_the_page_opens_and_says_that_one_is_needed(page):
    page.ask("Hi", key="wrong")
    assert "API key" in page.wait_for(PROBLEM).text


BLOCKS = "return [...document.querySelectorAll('#clients code')].map(code => code.textContent)"


def connect(page):
    """The notes of the dialog, and its blocks by label, with the address that the documents have."""
    page.click("Connect")
    page.wait_for("#connect[open]")
    address = page.url.rpartition("/")[0]
    blocks = [text.replace(address, "http://localhost:8080") for text in page.script(BLOCKS)]
    return page.texts("#clients > p"), dict(zip(page.texts("#clients .code span"), blocks))


def documented(document, heading):
    section = (HERE / "docs" / document).read_text().split(f"\n## {heading}\n")[1]
    return section.split("```")[1].partition("\n")[2].rstrip("\n")


def test_the_lines_that_connect_a_client_are_those_of_the_documents_that_clients_are_tested_with(browser, scripted):
    page = Page(browser, scripted.url_of["long-context.html"])
    notes, blocks = connect(page)
    assert notes == []
    assert blocks == {
        "Claude Code": documented("agents.md", "Claude Code"),
        "Codex: ~/.codex/config.toml": documented("agents.md", "Codex"),
        "opencode: opencode.json": documented("agents.md", "opencode"),
        "Python, openai": documented("clients.md", "openai"),
        "Python, anthropic": documented("clients.md", "anthropic"),
        "curl": documented("clients.md", "curl"),
    }
    assert page.violations() == []


def test_lines_that_connect_a_client_have_the_key_and_any_name_of_a_model_quoted(browser, scripted):
    page = Page(browser, scripted.url_of["with-key.html"])
    notes, blocks = connect(page)
    name = '<b>it\'s</b> "mine"'
    assert notes[0].startswith("This server requires an API key: replace YOUR_KEY.") and len(notes) == 2
    assert notes[1] == "Coding agents need a context length of 32768 tokens or more; this server has 4096."
    shell = blocks["Claude Code"].removesuffix("claude") + 'printf %s= $ANTHROPIC_AUTH_TOKEN "$ANTHROPIC_MODEL"'
    assert subprocess.run(["bash", "-c", shell], capture_output=True, text=True).stdout == f"YOUR_KEY={name}="
    codex = blocks["Codex: ~/.codex/config.toml"]
    assert f"model = {json.dumps(name)}\n" in codex and "model_context_window = 4096\n" in codex
    assert codex.endswith('\nenv_key = "TEXTGEN_KEY"')
    settings = json.loads(blocks["opencode: opencode.json"])
    assert settings["model"] == f"textgen/{name}"
    assert settings["provider"]["textgen"]["options"]["apiKey"] == "YOUR_KEY"
    assert settings["provider"]["textgen"]["models"] == {name: {"name": name, "limit": {"context": 4096, "output": 2048}}}
    for client in ("Python, openai", "Python, anthropic"):
        words = {node.value for node in ast.walk(ast.parse(blocks[client])) if isinstance(node, ast.Constant)}
        assert {name, "YOUR_KEY"} <= words
    curl = shlex.split(blocks["curl"])
    assert "Authorization: Bearer YOUR_KEY" in curl and json.loads(curl[-1])["model"] == name


def test_a_model_without_a_chat_template_is_connected_by_completions_alone(browser, scripted):
    notes, blocks = connect(Page(browser, scripted.url_of["without-chats.html"]))
    assert notes == ["This model has no chat template: it completes texts."]
    assert list(blocks) == ["curl"] and "http://localhost:8080/v1/completions" in blocks["curl"]


def test_a_line_that_connects_is_copied_and_answered_by_this_server(page):
    connect(page)
    page.find("#clients .code:last-child button")[0].click()
    page.wait_for_texts("#clients .code:last-child button", ["Copied"])
    page.click("Close")
    assert not page.find("#connect[open]")
    page.find("#prompt")[0].send_keys(webdriver.Keys.CONTROL, "v")
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    command = page.field.replace("YOUR_KEY", KEY)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["model"] == "neuron-textgen/demo" and answer["choices"][0]["message"]["content"]


DEMO = {"Weights": "float32", "Context": "1,024 tokens", "Runs on": "CPU", "Reads images": "no", "Calls tools": "not by itself"}


def test_before_the_first_message_the_page_describes_the_model_and_a_click_sends_what_it_can_answer(page):
    assert page.texts("#welcome-title") == ["neuron-textgen/demo"]
    assert page.facts == DEMO | {"API key": "in Settings"}
    assert page.texts("#examples button") == [
        "What is Deep Learning?",
        "How do I stream tokens?",
        "Write a haiku about the sea.",
    ]
    for name, value in {"key": KEY, "temperature": 0, "max_tokens": 40}.items():
        page.type(name, str(value))
    page.find("#settings summary")[0].click()
    page.try_out("How do I stream tokens?")
    page.wait_for_end()
    assert page.texts(OWN) == ["How do I stream tokens?"] and "/generate_stream" in page.texts(SOME)[0]
    assert re.match(r"[0-9.]+ tokens/s, ", page.texts(".figures")[0])
    assert not page.find("#welcome")[0].is_displayed()
    page.click("New chat")
    wait_until(page.find("#welcome")[0].is_displayed, "the model and messages to try again")


def test_the_example_of_a_tool_shows_the_call_and_is_asked_with_the_tool_again(browser, scripted):
    page = Page(browser, scripted.url_of["with-tools.html"], scripted.answers)
    assert page.facts["Calls tools"] == "yes"
    page.try_out("What is the weather in Tartu?")
    for is_first in (True, False):
        answer = page.next_answer()
        (tool,) = answer.body["tools"]
        assert tool["function"]["name"] == "get_weather" and answer.asked == ["What is the weather in Tartu?"]
        call = [("get_weather", ""), (None, '{"city": '), (None, '"Tartu"}')]
        for name, arguments in call:
            answer.write(tool_calls=[{"index": 0, "function": {"name": name, "arguments": arguments}}])
        answer.end()
        page.wait_for_texts(SOME, ['get_weather {"city": "Tartu"}'])
        page.wait_for_end()
        if is_first:
            page.click("Regenerate")
    page.ask("Thanks")
    answer = page.next_answer()
    answer.end()
    assert "tools" not in answer.body
    page.wait_for_end()
    assert page.violations() == []


def test_the_example_of_a_picture_is_sent_with_it(seeing):
    seeing.try_out("Which shapes and colors do you see?")
    answer = seeing.next_answer()
    answer.end()
    ((image, text),) = answer.asked
    assert text == {"type": "text", "text": "Which shapes and colors do you see?"}
    head, picture = sent(image["image_url"]["url"])
    assert (head, picture.size) == ("data:image/png;base64", (224, 224))
    colors = [picture.convert("RGB").getpixel(place) for place in ((0, 0), (60, 60), (150, 150))]
    assert colors == [(255, 255, 255), (221, 34, 34), (17, 85, 204)]


def test_the_example_of_json_is_asked_with_a_schema(chat):
    chat.try_out("Which city is the capital of Estonia?")
    answer = chat.next_answer()
    answer.end()
    assert answer.body["response_format"]["json_schema"]["schema"]["required"] == ["city", "country"]


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        ("page.html", ["", "with a JSON schema", ""]),
        ("with-images.html", ["", "with a picture", "with a JSON schema"]),
        ("with-tools.html", ["", "with a tool", "with a JSON schema"]),
        ("without-chats.html", ["", "", ""]),
        ("on-device.html", ["", "", ""]),
    ],
)
def test_the_examples_are_what_the_model_can_do(browser, scripted, variant, kinds):
    page = Page(browser, scripted.url_of[variant], scripted.answers)
    assert page.texts("#examples small") == kinds
    page.find("#examples button")[0].send_keys(webdriver.Keys.ENTER)
    answer = page.next_answer()
    assert page.browser.switch_to.active_element.get_attribute("id") == "stop"
    answer.end()
    assert answer.path == ("/v1/completions" if variant == "without-chats.html" else "/v1/chat/completions")
    assert page.violations() == []


def test_a_name_of_a_model_is_no_markup(browser, scripted):
    page = Page(browser, scripted.url_of["with-key.html"])
    assert page.texts("#welcome-title") == page.texts("h1") == ['<b>it\'s</b> "mine"'] and page.find("b") == []


def test_before_the_first_message_everything_is_in_reach_on_a_small_screen(browser, scripted):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SMALL)
    try:
        page = Page(browser, scripted.url_of["with-key.html"])
        page.script("document.querySelector('#settings').open = true")
        views = "[document.documentElement, document.querySelector('#welcome')]"
        assert page.script(f"return {views}.filter(view => view.scrollWidth > view.clientWidth)") == []
        assert page.script("return document.documentElement.scrollHeight") == SMALL["height"]
        page.find("#examples button")[-1].send_keys("")  # the keyboard brings it into view
        assert page.script("return document.querySelector('#welcome').clientHeight") > 100
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_while_the_model_is_prepared_the_page_shows_how_far_it_is(browser, scripted):
    scripted.health = {"phase": "downloading", "progress": "downloading some/model after 20 s: 120 of 480 MB (25 %)"}
    page = Page(browser, scripted.url_of["preparing.html"])
    assert page.texts("#welcome-title") == ["Preparing some/model"]
    page.wait_for_texts("#phase", ["Downloading some/model after 20 s: 120 of 480 MB (25 %)"])
    (bar,) = page.find("#bar")
    wait_until(lambda: bar.get_property("position") == 0.25, "a quarter")
    assert [one.id for one in page.find("#form, #open-connect, #examples button") if one.is_displayed()] == []
    scripted.health = {"phase": "converting"}
    page.wait_for_texts("#phase", ["Converting. Later starts skip this."])
    wait_until(lambda: bar.get_property("position") == -1, "a bar without a share")
    assert page.violations() == []


def test_a_page_that_is_opened_during_a_download_becomes_the_chat(browser, tmp_path):
    with Hub() as hub:
        hub.push("someone/demo", DEMO_MODEL)
        hub.fail("model.safetensors", "hang")
        with Server("--model-id", "someone/demo", **hub.environment(tmp_path)) as server:
            wait_until(hub.hangs.is_set, "the weights are requested")
            page = Page(browser, f"http://127.0.0.1:{server.port}/")
            assert page.texts("#welcome-title") == ["Preparing someone/demo"]
            page.wait_for_texts("#phase", ["Downloading someone/demo"])
            assert not page.find("#form")[0].is_displayed()
            page.script("window.isThisPage = true")
            hub.may_go_on.set()
            wait_until(lambda: page.texts("#welcome-title") == ["someone/demo"], "the chat")
            assert page.script("return window.isThisPage") is None
            page.try_out("Write a short story")
            page.wait_for(SOME)
            page.wait_for_end()
            assert "tokens/s" in page.texts(".figures")[0]
            assert page.violations() == []


def test_the_api_page_shows_the_routes(browser, server):
    browser.get(f"http://127.0.0.1:{server.port}/docs/")
    wait_until(lambda: len(browser.find_elements("css selector", ".opblock")) > 10, "the routes")


def test_after_an_error_the_text_is_back_in_the_field_and_can_be_sent_again(chat):
    chat.ask("Hello")
    answer = chat.next_answer()
    chat.type("prompt", "typed meanwhile")
    answer.refuse(429, "Model is overloaded")
    chat.wait_for_texts(PROBLEM, ["Model is overloaded (429)"])
    assert chat.field == "Hello" and chat.find("article.user") == []
    chat.click("Retry")
    answer = chat.next_answer()
    assert answer.asked == ["Hello"] and chat.field == "typed meanwhile" and chat.find("article.error") == []
    answer.write("Good ")
    answer.fail("out of memory")  # half an answer stays, and the text can be sent again in its place
    chat.wait_for_texts(PROBLEM, ["out of memory"])
    assert chat.field == "Hello" and chat.texts(SOME) == ["Good"]
    chat.click("Retry")
    answer = chat.next_answer()
    answer.write("Good day")
    answer.end()
    chat.wait_for_texts(SOME, ["Good day"])
    assert answer.asked == ["Hello"] and chat.texts(OWN) == ["Hello"]


def test_a_new_chat_while_an_answer_runs_begins_with_nothing_of_it(chat):
    chat.exchange("One", "1")
    chat.ask("Two")
    chat.next_answer().write("2")
    chat.wait_for_texts(SOME, ["1", "2"])
    chat.click("New chat")
    wait_until(lambda: not chat.find("article"), "an empty chat")
    assert chat.exchange("Three", "3") == ["Three"]
    assert chat.texts(SOME) == ["3"]


def test_thinking_is_folded_and_its_tokens_count(chat):
    chat.ask("Why?")
    answer = chat.next_answer()
    answer.write(reasoning="Let me see.", reasoning_content="Let me see.")
    chat.wait_for_texts(".thinking:not([hidden]) summary", ["Thinking"])
    (summary,) = chat.find(".thinking summary")
    begun_at = time.monotonic()
    (thoughts,) = chat.find(".thinking div")
    assert not thoughts.is_displayed()
    summary.click()
    assert thoughts.text == "Let me see."
    chat.wait_for_texts("#status", ["Thinking"])
    thought_s = time.monotonic() - begun_at
    answer.write("Because.")
    answer.end(tokens=51)
    chat.wait_for_end()
    assert chat.texts(SOME) == ["Because."] and summary.text.startswith("Thought for ")
    tokens_per_s = float(chat.texts(".figures")[0].split(" tokens/s")[0])
    assert 0 < tokens_per_s <= 50 / thought_s
    assert chat.exchange("And?", "So.") == ["Why?", "Because.", "And?"]


MARKDOWN = """## Two *things*
1. **First** with `code_of_it`
   - inner [link](https://example.com/a_(b)) [bad](javascript:alert(1)) <img src=x onerror="window.hacked=1">
2. snake_case_name, 2 * 3 * 4

> quoted https://example.com/x.

| a | b |
|---|--:|
| 1 \\| 2 | **x**<br>y |

```python
def f():
\treturn "<b>"
```"""


def test_markdown_is_shown_and_html_stays_text(chat):
    chat.exchange("Everything", *MARKDOWN[:-3], MARKDOWN[-3:])
    shown = chat.script("return document.querySelector('article.assistant .text').innerHTML.replaceAll('\\n', '⏎')")
    link = 'target="_blank" rel="noopener noreferrer"'
    expected = [
        '<h3 class="level2">Two <em>things</em></h3>',
        '<ol start="1"><li><p><strong>First</strong> with <code>code_of_it</code></p><ul><li>',
        f'<p>inner <a href="https://example.com/a_(b)" {link}>link</a> [bad](javascript:alert(1)) &lt;img src=x',
        "<li><p>snake_case_name, 2 * 3 * 4</p></li></ol>",
        f'<blockquote><p>quoted <a href="https://example.com/x" {link}>https://example.com/x</a>.</p></blockquote>',
        "<thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1 | 2</td><td><strong>x</strong><br>y</td></tr>",
        '<code>def f():⏎\treturn "&lt;b&gt;"</code></pre>',
    ]
    assert [part for part in expected if part not in shown] == []
    assert chat.find("article img") == [] and chat.script("return window.hacked") is None
    assert chat.script("try { document.body.innerHTML = '<b>' } catch (error) { return error.name }") == "TypeError"


def test_code_and_messages_can_be_copied(chat):
    chat.exchange("Code", "```sh\nls  -l\n```")
    for selector, copied in ((".code button", "ls  -l"), (".assistant > .actions button", "```sh\nls  -l\n```")):
        chat.find(selector)[0].click()
        chat.wait_for_texts(selector, ["Copied", *chat.texts(selector)[1:]])
        chat.type("prompt", "")
        chat.find("#prompt")[0].send_keys(webdriver.Keys.CONTROL, "v")
        assert chat.field == copied


def test_who_scrolls_up_stays_there_while_the_answer_grows(chat):
    chat.ask("A poem")
    answer = chat.next_answer()

    def grow(word):
        answer.write("line\n\n" * 40 + word)
        wait_until(lambda: any(word in text for text in chat.texts(SOME)), word)
        return chat.script("const view = document.querySelector('#chat'); return [view.scrollTop, view.scrollHeight]")

    top, height = grow("first")
    assert top > height / 2  # it follows
    chat.scroll("#chat", 100)
    top, height = grow("second")
    assert top == 100
    chat.scroll("#chat", 1e9)
    assert grow("third")[0] > height
    answer.end()
    chat.wait_for_end()


def test_an_answer_can_be_generated_again(chat):
    chat.exchange("One", "1")
    chat.exchange("Two", "2")
    chat.click("Regenerate")
    chat.next_answer().refuse(503, "not now")
    chat.wait_for_texts(PROBLEM, ["not now (503)"])
    assert chat.texts(SOME) == ["1", "2"]  # there is no better one yet
    chat.click("Retry")
    answer = chat.next_answer()
    answer.write("22")
    answer.end()
    chat.wait_for_texts(SOME, ["1", "22"])
    assert answer.asked == ["One", "1", "Two"] and chat.texts(OWN) == ["One", "Two"]


def test_a_message_can_be_edited_and_what_followed_it_goes(chat):
    chat.exchange("One", "1")
    chat.exchange("Two", "2")
    chat.type("prompt", "a draft")
    chat.find(".edit")[0].click()
    assert chat.field == "One" and chat.texts("#prompt-label") == ["Edit the message (removes what follows)"]
    chat.click("Cancel")
    assert chat.field == "a draft" and chat.texts(SOME) == ["1", "2"]
    chat.find(".edit")[0].click()
    assert chat.exchange("Uno", "uno") == ["Uno"]
    assert chat.texts(OWN) == ["Uno"] and chat.texts(SOME) == ["uno"] and chat.field == "a draft"


def test_a_conversation_survives_a_reload_unless_the_user_does_not_want_that(chat):
    chat.type("system", "Be brief.")
    assert chat.exchange("One", "**1**") == ["Be brief.", "One"]
    chat.ask("Two")
    chat.next_answer().write("half")
    chat.wait_for_texts(SOME, ["1", "half"])
    chat.browser.refresh()
    assert chat.texts(SOME) == ["1", "half"] and chat.find(".text strong") and not chat.field
    chat.ask("Three")
    assert chat.next_answer().asked == ["Be brief.", "One", "**1**", "Two", "half", "Three"]
    chat.browser.refresh()  # before its answer began
    assert chat.texts(OWN) == ["One", "Two"] and chat.field == "Three"
    chat.script("document.querySelector('#settings').open = true")
    chat.find("#keep")[0].click()
    chat.browser.refresh()
    assert chat.find("article") == [] and not chat.find("#keep")[0].is_selected()
    assert json.loads(chat.script("return localStorage.getItem('neuron-textgen')")) == {"keep": False}


def test_on_a_small_screen_the_chat_is_usable_with_settings_open(chat):
    chat.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SMALL)
    try:
        chat.exchange("A table", "| a | b |\n|---|---|\n| " + "wide" * 40 + " | b |\n\n`" + "code" * 40 + "`")
        chat.script("document.querySelector('#settings').open = true")
        assert chat.script("return document.querySelector('#chat').clientHeight") >= 250
        views = "[document.documentElement, document.querySelector('#chat')]"
        wide = f"return {views}.filter(view => view.scrollWidth > view.clientWidth)"
        assert chat.script(wide) == []
        assert chat.script("return document.documentElement.scrollHeight") == 760
    finally:
        chat.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_has_a_name_and_its_own_place_for_the_keyboard(chat):
    chat.exchange("One", "1")
    chat.script("document.querySelector('#settings').open = true")
    controls = [control for control in chat.find("a, button, input, textarea, summary, main") if control.is_displayed()]
    assert [control.get_attribute("outerHTML") for control in controls if not control.accessible_name] == []
    (prompt,) = chat.find("#prompt")
    prompt.send_keys("x")
    style = "const style = getComputedStyle(arguments[0]);"
    ring = style + "return parseFloat(style.outlineOffset) + parseFloat(style.outlineWidth)"
    (label,) = chat.find("#prompt-label")
    assert label.rect["y"] + label.rect["height"] < prompt.rect["y"] - chat.script(ring, prompt)
    loaded = chat.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [url for url in loaded if not url.startswith(chat.url.removesuffix("page.html"))] == []


@pytest.fixture
def seeing(browser, scripted):
    """As `chat`, of a model that reads images."""
    page = Page(browser, scripted.url_of["with-images.html"], scripted.answers)
    yield page
    assert page.violations() == []


THUMBNAILS = "#images img"


@pytest.fixture
def picture(tmp_path):
    """Makes files of images, by their width and height."""

    def make(width, height, name="a.png", **options):
        path = tmp_path / name
        image = Image.new("RGB", (width, height), "teal")
        image.paste("orange", (0, 0, width // 2, height // 2))  # the upper left quarter
        image.save(path, **options)
        return path

    return make


def data_url(path, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def content(url, text):
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def sent(url):
    """The image that the page has made."""
    head, _, data = url.partition(",")
    return head, Image.open(io.BytesIO(base64.b64decode(data)))


# Events that a user's paste and drop make, with files of these media types and data: URLs.
GIVE = """
const [selector, type, files, text] = arguments;
const data = new DataTransfer();
for (const [name, media, base64] of files) {
  data.items.add(new File([Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0))], name, {type: media}));
}
if (text) data.setData("text/plain", text);
const options = {bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data};
const event = type === "paste" ? new ClipboardEvent(type, options) : new DragEvent(type, options);
document.querySelector(selector).dispatchEvent(event);
return event.defaultPrevented;
"""


def give(page, selector, event, *paths, text="", media_type="image/png"):
    """Whether the page takes the files."""
    files = [(path.name, media_type, base64.b64encode(path.read_bytes()).decode()) for path in paths]
    return page.script(GIVE, selector, event, files, text)


def exchange(page, text, answer="ok"):
    """A message and its answer. Returns the messages that were sent."""
    page.ask(text)
    given = page.next_answer()
    given.write(answer)
    given.end()
    page.wait_for_end()
    return given.body["messages"]


def test_an_image_is_sent_with_the_message_and_stays_in_the_conversation(seeing, picture):
    path = picture(40, 20)
    seeing.find("#file")[0].send_keys(str(path))
    seeing.wait_for(THUMBNAILS)
    first = {"role": "user", "content": content(data_url(path), "What is this?")}
    assert exchange(seeing, "What is this?") == [first]
    assert seeing.find(THUMBNAILS) == []
    (shown,) = seeing.find("article.user img")
    assert seeing.script("return [arguments[0].naturalWidth, arguments[0].alt]", shown) == [40, "Image 1"]
    assert exchange(seeing, "And now?") == [
        first,
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "And now?"},
    ]


def test_images_are_pasted_and_dropped_removed_and_sent_without_a_text(seeing, picture):
    one, other = picture(10, 10, "one.png"), picture(20, 20, "other.png")
    assert give(seeing, "#prompt", "paste", one)
    assert give(seeing, "#chat", "dragover", other)
    assert give(seeing, "#chat", "drop", other, one)
    seeing.wait_for_texts("#images button", ["Remove"] * 3)
    first, *_ = seeing.find("#images button")
    assert first.accessible_name == "Remove image 1"
    first.send_keys(webdriver.Keys.ENTER)
    seeing.wait_for_texts("#images button", ["Remove"] * 2)
    assert seeing.browser.switch_to.active_element.get_attribute("id") == "prompt"
    seeing.click("Send")
    answer = seeing.next_answer()
    answer.end()
    seeing.wait_for_end()
    assert answer.asked == [[content(data_url(path), "")[0] for path in (other, one)]]


def test_a_text_that_is_pasted_with_an_image_of_it_stays_a_text(seeing, picture):
    assert not give(seeing, "#prompt", "paste", picture(10, 10), text="words")
    assert not give(seeing, "#prompt", "paste", text="words")
    assert exchange(seeing, "Hello") == [{"role": "user", "content": "Hello"}]


def test_a_large_image_is_scaled_down_and_upright(seeing, picture):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter to the right
    seeing.find("#file")[0].send_keys(str(picture(3000, 1500, "large.jpg", exif=exif)))
    seeing.wait_for(THUMBNAILS)
    seeing.find("#file")[0].send_keys(str(picture(4, 2100, "tall.png")))
    seeing.wait_for_texts("#images button", ["Remove"] * 2)
    (message,) = exchange(seeing, "Which?")
    (head, image), (tall_head, tall) = (sent(part["image_url"]["url"]) for part in message["content"][:2])
    assert (head, image.size, tall_head, tall.size) == (
        "data:image/jpeg;base64",
        (1024, 2048),
        "data:image/png;base64",
        (4, 2048),
    )
    red, _green, blue = image.convert("RGB").getpixel((900, 100))
    assert red > 200 and blue < 50  # orange: the quarter is at the upper right


def test_other_formats_become_png_and_what_is_no_image_is_named(seeing, picture, tmp_path):
    seeing.find("#file")[0].send_keys(str(picture(10, 10, "a.bmp")))
    seeing.wait_for(THUMBNAILS)
    (tmp_path / "notes.png").write_text("no image")
    seeing.find("#file")[0].send_keys(str(tmp_path / "notes.png"))
    seeing.wait_for_texts("#image-error", ["notes.png is not an image that this browser can read."])
    (message,) = exchange(seeing, "Which?")
    assert sent(message["content"][0]["image_url"]["url"])[0] == "data:image/png;base64" and len(message["content"]) == 2


def test_an_image_waits_in_the_field_with_its_text_after_an_error_and_while_another_message_is_edited(seeing, picture):
    path = picture(10, 10)
    give(seeing, "#prompt", "paste", path)
    seeing.wait_for(THUMBNAILS)
    seeing.ask("What?")
    seeing.next_answer().refuse(400, "no")
    seeing.wait_for_texts(PROBLEM, ["no (400)"])
    assert seeing.field == "What?" and len(seeing.find(THUMBNAILS)) == 1
    seeing.click("Retry")
    answer = seeing.next_answer()
    answer.write("A square")
    answer.end()
    seeing.wait_for_end()
    assert answer.asked == [content(data_url(path), "What?")] and seeing.find(THUMBNAILS) == []
    seeing.find(".edit")[0].click()
    assert len(seeing.find(THUMBNAILS)) == 1
    seeing.click("Cancel")
    assert seeing.find(THUMBNAILS) == []
    seeing.click("Regenerate")
    answer = seeing.next_answer()
    answer.end()
    assert answer.asked == [content(data_url(path), "What?")]


def test_images_survive_a_reload_unless_they_are_too_large_for_the_browser(seeing, picture, tmp_path):
    give(seeing, "#prompt", "paste", picture(10, 10))
    seeing.wait_for(THUMBNAILS)
    exchange(seeing, "small")
    seeing.browser.refresh()
    assert len(seeing.find("article.user img")) == 1
    noise = Image.effect_noise((2000, 1200), 200)
    Image.merge("RGB", [noise, noise.rotate(90), noise.rotate(180)]).save(tmp_path / "noise.png")
    seeing.find("#file")[0].send_keys(str(tmp_path / "noise.png"))
    seeing.wait_for(THUMBNAILS)
    exchange(seeing, "large")
    seeing.browser.refresh()
    assert seeing.texts(OWN) == ["small", "large"] and seeing.find("article.user img") == []


def test_a_model_that_reads_no_images_is_offered_none(chat, picture):
    assert not chat.find("#add-image")[0].is_displayed()
    assert not give(chat, "#prompt", "paste", picture(10, 10))
    assert chat.exchange("Hello", "1") == ["Hello"]


def test_images_have_names_and_a_place_on_a_small_screen(seeing, picture):
    seeing.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SMALL)
    try:
        for size in ((900, 300), (300, 900), (200, 200), (1200, 100)):
            give(seeing, "#prompt", "paste", picture(*size))
        seeing.wait_for_texts("#images button", ["Remove"] * 4)
        shown = [control for control in seeing.find("button, img, #images") if control.is_displayed()]
        assert [control.get_attribute("outerHTML") for control in shown if not control.accessible_name] == []
        views = "[document.documentElement, document.querySelector('#chat')]"
        assert seeing.script(f"return {views}.filter(view => view.scrollWidth > view.clientWidth)") == []
        assert seeing.script("return document.documentElement.scrollHeight") == 760
        exchange(seeing, "What are these?", "Four")
        assert seeing.script(f"return {views}.filter(view => view.scrollWidth > view.clientWidth)") == []
    finally:
        seeing.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
