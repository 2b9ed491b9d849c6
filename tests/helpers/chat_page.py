"""The page at `/` in Debian's chromium, as a user sees and drives it. Without chromium its tests are skipped."""

import shutil

import pytest
from processes import WAIT_S, wait_until

webdriver = pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("needs chromium and chromedriver (apt install chromium chromium-driver)", allow_module_level=True)


def chromium(folder):
    """A browser without a screen, whose profile is in the folder."""
    options = webdriver.ChromeOptions()
    quiet = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking")
    for argument in (*quiet, "no-first-run", "window-size=420,800", f"user-data-dir={folder}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


class Page:
    def __init__(self, browser, url, answers=None):
        self.browser = browser
        self.url = url
        self.answers = answers
        for _ in range(2):  # the second time without what the first one has kept
            browser.get(url)
            browser.execute_script("localStorage.clear()")

    def violations(self):
        """Of the content security policy, and errors of the page's own scripts."""
        messages = [entry["message"] for entry in self.browser.get_log("browser")]
        return [message for message in messages if "Content Security Policy" in message or "Uncaught" in message]

    def find(self, selector):
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector):
        # In one step: elements may be replaced meanwhile.
        return self.script("return [...document.querySelectorAll(arguments[0])].map(it => it.innerText.trim())", selector)

    def script(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def type(self, name, text):
        (field,) = self.find(f"#{name}")
        self.script("arguments[0].closest('details')?.setAttribute('open', '')", field)
        field.clear()
        field.send_keys(text)

    def ask(self, text, **settings):
        for name, value in settings.items():
            self.type(name, str(value))
        self.type("prompt", text + "\n")

    @property
    def facts(self):
        """What the page says about the model before the first message."""
        return dict(zip(self.texts("#facts dt"), self.texts("#facts dd")))

    def try_out(self, text):
        """Clicks on the message with this text among those to try."""
        (card,) = [card for card in self.find("#examples button") if card.text.startswith(text)]
        card.click()

    def click(self, label):
        """The last button of this name that is shown."""
        shown = [button for button in self.find("button") if button.text == label]
        self.script("arguments[0].scrollIntoView()", shown[-1])
        shown[-1].click()

    def scroll(self, selector, to):
        """Scrolls an element, and waits until the page knows: it hears of that with the next frame."""
        script = "const [view, to, done] = arguments; view.addEventListener('scroll', done, {once: true}); view.scrollTop = to"
        self.browser.execute_async_script(script, self.find(selector)[0], to)

    def wait_for(self, selector):
        return wait_until(lambda: self.find(selector), selector)[-1]

    def wait_for_texts(self, selector, texts):
        wait_until(lambda: self.texts(selector) == texts, f"{selector}: {texts}")

    def wait_for_end(self):
        wait_until(lambda: self.find("#send")[0].is_displayed(), "the end")

    def next_answer(self):
        return self.answers.get(timeout=WAIT_S)

    def exchange(self, text, *pieces):
        """A message and its answer. Returns what was asked."""
        self.ask(text)
        answer = self.next_answer()
        for piece in pieces:
            answer.write(piece)
        answer.end()
        self.wait_for_end()
        return answer.asked

    @property
    def field(self):
        return self.find("#prompt")[0].get_property("value")
