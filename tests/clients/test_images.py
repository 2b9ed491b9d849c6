"""Images as clients send them: openai's, anthropic's, LangChain's and Hugging Face's own parts, to a tiny LLaVA."""

import base64
import contextlib
import http.server
import os
import ssl
import subprocess
import threading

import anthropic
import openai
import pytest
from demo_server import ROOT, serving
from huggingface_hub import InferenceClient
from image_files import IMAGE_TOKENS, png
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

MODEL = "tiny-llava"
QUESTION = "What is this?"
LIMITS = {"model": MODEL, "max_tokens": 2}


PNG = png()
BASE64 = base64.b64encode(PNG).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"


class Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hosting(tls=None):
    """The host and port of an image."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def host():
    with hosting() as host:
        yield host


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1, signed by itself, and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "own.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -days 9"
    subprocess.run(
        [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", "cert"], cwd=path.parent, check=True
    )
    path.write_text(path.read_text() + (path.parent / "cert").read_text())
    return path


@pytest.fixture(scope="module")
def secure_host(certificate):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with hosting(tls) as host:
        yield host


@pytest.fixture
def image_url(host):
    """The URL of an image."""
    return f"http://{host}/a.png"


@pytest.fixture(scope="module")
def url(tmp_path_factory, host, secure_host, certificate):
    """Of a server of the model, which fetches images of the two hosts."""
    folder = tmp_path_factory.mktemp("models")
    make = [os.environ["SERVER_PYTHON"], "tests/helpers/vision_models.py", str(folder), "llava"]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    settings = {"MODEL_ID": str(folder / "llava"), "MODEL_CACHE": str(folder / "cache"), "SERVED_MODEL_NAME": MODEL}
    with serving(**settings, ALLOWED_MEDIA_DOMAINS=f"{host} {secure_host}", SSL_CERT_FILE=str(certificate)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def text_tokens(client):
    """Of the question without an image."""
    return client.chat.completions.create(**LIMITS, messages=[{"role": "user", "content": QUESTION}]).usage.prompt_tokens


@pytest.fixture
def counts_image(text_tokens):
    """Asserts that a prompt has the tokens of the question and of so many images: the line break behind each splits a word."""

    def check(prompt_tokens, images=1):
        assert 0 < prompt_tokens - text_tokens - images * IMAGE_TOKENS <= 3 * images

    return check


def part(url, **options):
    return {"type": "image_url", "image_url": {"url": url, **options}}


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def test_openai_sends_images_in_chats(client, counts_image, image_url):
    for parts in ([part(DATA_URL)], [part(DATA_URL, detail="low")], [part(image_url)], [part(DATA_URL), part(image_url)]):
        answer = client.chat.completions.create(**LIMITS, messages=asked(*parts))
        counts_image(answer.usage.prompt_tokens, len(parts))
        assert answer.choices[0].message.role == "assistant"


def test_an_image_is_fetched_over_tls(client, counts_image, secure_host):
    answer = client.chat.completions.create(**LIMITS, messages=asked(part(f"https://{secure_host}/a.png")))
    counts_image(answer.usage.prompt_tokens)


def test_openai_streams_and_finds_the_image_in_the_cache_in_the_next_turn(client, counts_image):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(client.chat.completions.create(**LIMITS, messages=asked(part(DATA_URL)), **options))
    counts_image(events[-1].usage.prompt_tokens)
    history = [*asked(part(DATA_URL)), {"role": "assistant", "content": "a"}, {"role": "user", "content": "And?"}]
    usage = client.chat.completions.create(**LIMITS, messages=history).usage
    assert usage.prompt_tokens_details.cached_tokens > IMAGE_TOKENS


def test_openai_sends_images_to_the_responses_api(client, counts_image, image_url):
    for url in (DATA_URL, image_url):
        content = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": QUESTION}]
        asked = [{"role": "user", "content": content}]
        answer = client.responses.create(model=MODEL, max_output_tokens=20, input=asked)
        counts_image(answer.usage.input_tokens)
        later = client.responses.create(model=MODEL, max_output_tokens=20, input="And?", previous_response_id=answer.id)
        assert later.usage.input_tokens > answer.usage.input_tokens


def test_a_host_that_is_not_named_and_what_is_no_image_are_refused_by_their_place(client, image_url):
    for url, words in (
        (image_url.replace("127.0.0.1", "localhost"), "from which this server does not fetch images"),
        ("http://169.254.169.254/latest/meta-data", "from which this server does not fetch images"),
        (f"data:image/png;base64,{base64.b64encode(b'text').decode()}", "image"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(**LIMITS, messages=asked(part(url)))
        assert caught.value.param == "messages[0].content[0].image_url.url"


SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}


def test_anthropic_sends_images_and_counts_them(claude, counts_image, image_url):
    for source in (SOURCE, {"type": "url", "url": image_url}):
        messages = asked({"type": "image", "source": source})
        usage = claude.messages.create(**LIMITS, messages=messages).usage
        counts_image(usage.input_tokens + usage.cache_read_input_tokens)
        counts_image(claude.messages.count_tokens(model=MODEL, messages=messages).input_tokens)


def test_anthropic_sends_an_image_as_the_result_of_a_tool(claude, text_tokens):
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": SOURCE}]}
    tool = {"name": "Read", "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}}}
    messages = [*asked(), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, tools=[tool]).input_tokens
    usage = claude.messages.create(**LIMITS, messages=messages, tools=[tool]).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens > text_tokens + IMAGE_TOKENS


LANGCHAIN = {
    "image_url": part(DATA_URL),
    "image": {"type": "image", "base64": BASE64, "mime_type": "image/png"},
}


@pytest.mark.parametrize("is_responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("kind", LANGCHAIN)
def test_langchain_sends_images(url, counts_image, is_responses, kind):
    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=20, use_responses_api=is_responses)
    answer = chat.invoke([HumanMessage([LANGCHAIN[kind], {"type": "text", "text": QUESTION}])])
    counts_image(answer.usage_metadata["input_tokens"])


def test_langchain_sends_an_image_by_its_url(url, counts_image, image_url):
    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=2)
    answer = chat.invoke([HumanMessage([{"type": "image", "url": image_url}, {"type": "text", "text": QUESTION}])])
    counts_image(answer.usage_metadata["input_tokens"])


def test_hugging_face_sends_images_in_chats(url, counts_image, image_url):
    client = InferenceClient(base_url=url)
    for image in (DATA_URL, image_url):
        counts_image(client.chat_completion(asked(part(image)), max_tokens=2).usage.prompt_tokens)


def test_hugging_face_sends_images_in_prompts(url, image_url):
    client = InferenceClient(base_url=url)
    for image in (DATA_URL, image_url):
        prompt = f"![]({image}){QUESTION}"
        details = client.text_generation(prompt, max_new_tokens=2, details=True, decoder_input_details=False).details
        assert details.generated_tokens == 2
