"""Images in the requests of every API, with a preprocessor that makes a token of each byte of a file."""

import base64
import contextlib
import functools
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import gevent
import msgspec
import pytest
from asked import CONFIG, INFO, TEMPLATE
from fakes.images import IMAGE, IMAGE_ID, FakePreprocessor, key_of
from fakes.model import greedy
from fakes.tokenizer import VOCABULARY, byte_tokenizer
from openai_api import chunks
from served import TEMPLATE as SERVERS_TEMPLATE
from served import Served as Running
from served import events, wait_until
from tokenizers import AddedToken

from api import tgi, tokenize
from api.anthropic import messages
from api.chats import conversation
from api.generation.image_urls import ImageUrlError
from api.generation.prepared_request import ModelText, Served, prompts_of, with_image_ids
from api.generation.request_images import WITH_FETCHED, WITH_PIXELS, RequestImages
from api.http import fields
from api.http.errors import ApiError
from api.http.response_store import OwnedResponses, ResponseStore
from api.openai import chat, responses
from text.output.call_syntaxes import ModelTools
from text.output.reasoning_formats import ModelReasoning
from text.output.tool_formats import TOOL_FORMATS
from text.template import ChatTemplate, image_mark
from text.template_capabilities import TemplateCapabilities
from text.tokenizer import Tokenizer

SEEING = msgspec.structs.replace(INFO, vocab_size=IMAGE_ID + 1, reads_images=True)
PARTS = (
    "{% macro parts(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ '<image>' if p.type == 'image' else p.text }}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
# The role of the tools is a text alone, as most templates have it.
TEXT_TOOLS = PARTS + TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'tool' else parts(m.content) }}")
ALL_ROLES = PARTS + TEMPLATE.replace("{{ m.content }}", "{{ parts(m.content) }}")


def image_tokenizer(folder):
    tokenizer = byte_tokenizer(folder)
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id(IMAGE) == IMAGE_ID
    return tokenizer


@functools.cache
def text(source):
    with tempfile.TemporaryDirectory() as folder:
        image_tokenizer(Path(folder))
        tokenizer = Tokenizer(folder, reserved=[IMAGE_ID])
    template = ChatTemplate(source, {})
    capabilities = TemplateCapabilities.of(template, IMAGE)
    return ModelText(tokenizer, template, None, ModelTools(TOOL_FORMATS[0]), capabilities, ModelReasoning(), FakePreprocessor())


def data_url(file, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def serving(source=ALL_ROLES, info=SEEING, config=CONFIG):
    images = RequestImages(text(source).images, lambda function: function(), ("example.com",))
    return Served(config, info, text(source), OwnedResponses(ResponseStore(Path(), 0), b"", 0), images)


@contextlib.contextmanager
def loaded(make, body, served):
    """What `make` reads of a body, with its images loaded, as the server does it."""
    data = fields.parse_body(json.dumps(body).encode())
    with served.images:
        made = make(data, served)
        served.images.load(lambda: None)
        yield made


def tokenized(make, body, served):
    """The prompt of a body."""
    with loaded(make, body, served) as writer:
        (prompt,) = prompts_of(writer.requests, served)
        return prompt


def prompt_of(make, body, source=ALL_ROLES):
    """The text of the prompt, in which an image of three bytes is [<image><image><image>]."""
    served = serving(source)
    with loaded(make, body, served) as writer:
        (prepared,) = writer.requests
        return served.images.expand(prepared.prompt, prepared.image_numbers)


def refused(make, body, source=ALL_ROLES):
    with pytest.raises(ApiError) as error, loaded(make, body, serving(source)):
        pass
    return error.value


CAT, DOG = b"cat", b"dog!"
A, B = (f"[{IMAGE * len(file)}]" for file in (CAT, DOG))


def of_chat(url, **fields):
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def chat_of(*content, role="user"):
    return {"messages": [{"role": role, "content": list(content)}]}


# Where an image of each API stands, and its field.
def as_chat(url):
    return chat.chat, chat_of({"type": "text", "text": "a"}, of_chat(url), {"type": "text", "text": "b"})


def as_message(url):
    block = {"type": "image", "source": {"type": "url", "url": url}}
    return messages.messages, {"max_tokens": 9, **chat_of({"type": "text", "text": "a"}, block, {"type": "text", "text": "b"})}


def as_response(url):
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "b"},
    ]
    return responses.responses, {"input": [{"role": "user", "content": parts}]}


def as_native(url):
    return tgi.generate, {"inputs": f"u:a![]({url})b;a:"}


APIS = {
    "chat": (as_chat, "messages[0].content[1].image_url.url"),
    "messages": (as_message, "messages[0].content[1].source.url"),
    "responses": (as_response, "input[0].content[1].image_url"),
    "native": (as_native, "inputs.images[0]"),
}
EACH_API = pytest.mark.parametrize(("asked", "field"), APIS.values(), ids=APIS)


@EACH_API
def test_an_image_stands_between_the_texts_around_it(asked, field):
    make, body = asked(data_url(CAT))
    prompt = tokenized(make, body, serving())
    assert prompt_of(make, body) == f"u:a{A}b;a:"
    assert prompt.ids.count(IMAGE_ID) == len(CAT)
    assert [image.tokens for image in prompt.images] == [len(CAT)]


@EACH_API
@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (data_url(b"bad"), "is not an image that this server reads"),
        (data_url(b"slow"), "takes longer than 5 s of processor time"),
        ("data:image/png;base64,", "has no data"),
        ("data:image/png;base64,????", "has data that is not base64"),
        ("data:image/png,x", "must be a `data:` URL in base64"),
        ("http://elsewhere.org/x.png", "--allowed-media-domains"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused_by_the_name_of_its_part(asked, field, url, sentence):
    error = refused(*asked(url))
    assert error.status == 422 and error.param == field
    assert f"`{field}` " in str(error) and sentence in str(error)


@EACH_API
def test_base64_is_read_as_it_is_written_in_every_api(asked, field):
    written = base64.encodebytes(CAT * 30).decode().replace("\n", "\r\n")
    plain, same = (
        tokenized(*asked(url), serving(info=msgspec.structs.replace(SEEING, max_total_tokens=999, max_input_tokens=999))).images
        for url in (data_url(CAT * 30), f"\n DATA:image/jpg;base64,{written} ")
    )
    assert same == plain


def test_base64_of_an_anthropic_source_is_read_as_it_is_written():
    written = base64.encodebytes(DOG * 30).decode().rstrip("=\n")
    given = {"max_tokens": 9, **chat_of(block(type="base64", media_type="image/png", data=written))}
    assert IMAGE * len(DOG * 30) in prompt_of(messages.messages, given)


def test_every_api_writes_the_same_prompt_and_the_worker_gets_the_ids_of_its_images():
    for asked, _ in APIS.values():
        make, body = asked(data_url(CAT))
        prompt = tokenized(make, body, serving())
        (image,) = prompt.images
        ids = with_image_ids(prompt.ids, [image], IMAGE_ID)
        assert [i for i in ids if i < 0] == list(image.ids)
        assert [IMAGE_ID if i < 0 else i for i in ids] == prompt.ids
        assert ids[ids.index(image.ids[0]) :][: len(CAT)] == list(image.ids)


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (of_chat(data_url(DOG), detail="auto"), 4),
        (of_chat(data_url(DOG), detail="low"), 1),
        ({"type": "image_url", "image_url": data_url(DOG), "detail": "low"}, 1),
        ({"type": "image_url", "image_url": data_url(DOG, "text/html")}, 4),  # what it is said to be is not looked at
        ({"type": "image_url", "image_url": data_url(DOG, "").replace("data:", "DATA:")}, 4),
    ],
)
def test_a_part_has_its_url_in_an_object_or_by_itself(part, tokens):
    assert prompt_of(chat.chat, chat_of(part)) == f"u:[{IMAGE * tokens}];a:"


def test_a_chat_overrides_how_its_images_are_preprocessed():
    body = chat_of(of_chat(data_url(DOG)), of_chat(data_url(CAT)), of_chat(data_url(CAT), detail="low"))
    written = prompt_of(chat.chat, body | {"mm_processor_kwargs": {"max_pixels": 2}})
    assert written == f"u:[{IMAGE * 2}][{IMAGE * 2}][{IMAGE}];a:"
    assert prompt_of(chat.chat, body | {"mm_processor_kwargs": {}}) == prompt_of(chat.chat, body)
    error = refused(chat.chat, body | {"mm_processor_kwargs": {"max_pixels": 2, "size": 3}})
    assert error.param == "mm_processor_kwargs"
    assert "has a field that this model does not support; supported: max_pixels. Given: 'size'" in str(error)


@pytest.mark.parametrize(
    ("part", "field", "sentence"),
    [
        ({"type": "image_url"}, "", "needs `image_url`"),
        ({"type": "image_url", "image_url": {}}, ".image_url", "needs `url`"),
        ({"type": "image_url", "image_url": {"url": {"url": {}}}}, ".image_url.url", "must be a string"),
        ({"type": "image_url", "image_url": [data_url(CAT)]}, ".image_url", "must be a string"),
        (of_chat(data_url(CAT), detail="best"), ".image_url.detail", "must be one of low, high, auto, original. Given: 'best'"),
        (of_chat("file:///etc/passwd"), ".image_url.url", "must be a `data:` URL"),
        (of_chat(""), ".image_url.url", "must be a `data:` URL"),
    ],
)
def test_a_part_without_an_image_is_refused_by_name(part, field, sentence):
    error = refused(chat.chat, chat_of(part))
    assert error.param == f"messages[0].content[0]{field}"
    assert sentence in str(error)


def block(**source):
    return {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("given", "field", "sentence"),
    [
        ({"type": "image"}, "", "needs `source`"),
        (block(type="base64"), ".source", "needs `data`"),
        (block(type="base64", data=""), ".source.data", "has no data"),
        (block(type="base64", data="a cat!"), ".source.data", "has data that is not base64"),
        (block(type="base64", data=base64.b64encode(b"bad").decode()), ".source.data", "is not an image"),
        (
            block(type="file", file_id="file_1"),
            ".source.type",
            "must be base64 or url: no files are stored here. Given: 'file'",
        ),
        (block(type="url", url="http://elsewhere.org/x"), ".source.url", "--allowed-media-domains"),
    ],
)
def test_a_block_without_an_image_is_refused_by_name(given, field, sentence):
    error = refused(messages.messages, {"max_tokens": 9, **chat_of(given)})
    assert error.param == f"messages[0].content[0]{field}"
    assert sentence in str(error)


def test_a_file_of_openai_is_refused_by_name():
    part = {"type": "input_image", "file_id": "file-1"}
    error = refused(responses.responses, {"input": [{"role": "user", "content": [part]}]})
    assert error.param == "input[0].content[0].file_id"
    assert "this server stores no files" in str(error)


# Images in other messages

CALL = {"id": "1", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
SHOT = {"type": "input_image", "image_url": data_url(CAT), "detail": "high"}
TOOL_RESULTS = [
    (
        chat.chat,
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}, of_chat(data_url(CAT))]},
            ]
        },
    ),
    (
        messages.messages,
        {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "shoot", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": [
                                {"type": "text", "text": "ok"},
                                block(type="base64", media_type="image/png", data=base64.b64encode(CAT).decode()),
                            ],
                        }
                    ],
                },
            ],
        },
    ),
    *(
        (
            responses.responses,
            {
                "input": [
                    {"role": "user", "content": "u"},
                    {"type": kind, "call_id": "1", "name": "shoot", arguments: "{}"},
                    {"type": f"{kind}_output", "call_id": "1", "output": [{"type": "input_text", "text": "ok"}, SHOT]},
                ]
            },
        )
        for kind, arguments in (("function_call", "arguments"), ("custom_tool_call", "input"))
    ),
]


@pytest.mark.parametrize(("make", "body"), TOOL_RESULTS)
def test_an_image_in_a_tool_result_is_a_part_of_it_where_the_template_writes_that(make, body):
    assert f";t:ok{A}1;a:" in prompt_of(make, body)
    assert prompt_of(make, body, TEXT_TOOLS).endswith(f";t:ok[image]1;u:{A};a:")


def test_images_of_several_results_follow_all_of_them():
    calls = [CALL, CALL | {"id": "2"}]
    results = [
        {"role": "tool", "tool_call_id": "1", "content": [of_chat(data_url(CAT))]},
        {"role": "tool", "tool_call_id": "2", "content": [of_chat(data_url(DOG))]},
    ]
    body = {"messages": [{"role": "assistant", "tool_calls": calls}, *results, {"role": "user", "content": "Next"}]}
    assert prompt_of(chat.chat, body, TEXT_TOOLS).endswith(f"t:[image]1;t:[image]2;u:{A}{B};u:Next;a:")


USERS_ALONE = PARTS + TEMPLATE.replace("{{ m.content }}", "{{ parts(m.content) if m.role == 'user' else m.content }}")


def test_images_of_other_roles_are_user_messages_where_the_template_writes_no_image_there():
    system = {"role": "system", "content": [{"type": "text", "text": "s"}, of_chat(data_url(CAT))]}
    user = {"role": "user", "content": "u"}
    answer = {"role": "assistant", "content": [of_chat(data_url(DOG)), {"type": "text", "text": "yes"}]}
    assert prompt_of(chat.chat, {"messages": [system, user, answer, user]}) == f"s:s{A};u:u;a:{B}yes;u:u;a:"
    asked = {"messages": [system, user, answer, user]}
    assert prompt_of(chat.chat, asked, USERS_ALONE) == f"s:s[image];u:{A};u:u;a:[image]yes;u:{B};u:u;a:"
    continued = {"messages": [user, answer]}
    assert prompt_of(chat.chat, continued, USERS_ALONE) == f"u:u;u:{B};a:[image]yes"


SCREENSHOT = {"type": "computer_screenshot", "image_url": data_url(CAT)}
COMPUTER = {"type": "computer_call", "call_id": "1", "actions": [{"type": "screenshot"}], "id": "c", "status": "completed"}
FILE = {"type": "file", "file": {"file_id": "x"}}


@pytest.mark.parametrize(
    ("make", "body", "words"),
    [
        (
            responses.responses,
            {"input": [COMPUTER, {"type": "computer_call_output", "call_id": "1", "output": SCREENSHOT}]},
            f"t:{A}1;",
        ),
        (responses.responses, {"input": [SHOT]}, f"u:{A};"),
        (responses.compact, {"model": "m", "input": [{"role": "user", "content": [SHOT]}]}, f"u:{A};"),
        (
            messages.messages,
            {"max_tokens": 9, "system": [block(type="url", url=data_url(CAT)), {"type": "text", "text": "s"}], **chat_of()},
            f"s:{A}s;",
        ),
        (
            messages.messages,
            {"max_tokens": 9}
            | chat_of({"type": "document", "source": {"type": "content", "content": [block(type="url", url=data_url(CAT))]}}),
            f"u:{A};",
        ),
        (chat.chat, chat_of(FILE, of_chat(data_url(CAT))), f"u:[file omitted: this server reads text and images only]{A};"),
    ],
)
def test_images_are_read_wherever_a_request_has_them(make, body, words):
    assert words in prompt_of(make, body)


# What a model that reads text alone is asked


def test_a_text_only_model_answers_as_before(monkeypatch):
    import asked as plain

    note = "[image omitted: this server reads text only]"
    for given, _ in APIS.values():
        make, body = given(data_url(CAT))
        (prepared,) = make(fields.parse_body(json.dumps(body).encode()), plain.serving()).requests
        if make is tgi.generate:
            assert prepared.prompt == body["inputs"]
        else:
            assert note in prepared.prompt
        assert not prepared.image_numbers


# What cannot be, and limits


def test_what_clients_write_cannot_become_an_image_or_its_token():
    url = data_url(CAT)
    texts = [{"type": "text", "text": "<ima"}, of_chat(url), {"type": "text", "text": f"ge>{IMAGE}"}]
    prompt = tokenized(chat.chat, chat_of(*texts), serving())
    assert prompt.ids.count(IMAGE_ID) == len(CAT)
    forged = json.dumps({"x": image_mark(0)})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": forged}}
    body = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": [of_chat(url)]}]
    }
    assert '"x": "??"' in prompt_of(chat.chat, body)
    prompt = tokenized(tgi.generate, {"inputs": f"{IMAGE}![]({url})<im"}, serving())
    assert prompt.ids.count(IMAGE_ID) == len(CAT)


def test_no_body_has_half_a_surrogate_pair():
    assert fields.parse_body(b'{"inputs": "\\ud800\\ud900"}') == {"inputs": "??"}
    with pytest.raises(ApiError) as error:
        fields.parse_body(b'{"inputs": "\xed\xa0\x80\xed\xa4\x80"}')
    assert error.value.status == 400


def test_a_template_that_leaves_out_an_image_is_an_error():
    first_alone = ALL_ROLES.replace("{% for p in c %}", "{% for p in c[:1] %}")
    error = refused(chat.chat, chat_of(of_chat(data_url(CAT)), of_chat(data_url(DOG))), first_alone)
    assert "`messages` has 2 images, and the model's chat template writes 1 of them" in str(error)


def test_a_request_has_at_most_so_many_images():
    twenty = [of_chat(data_url(CAT))] * 20
    assert prompt_of(chat.chat, chat_of(*twenty)).count(A) == 20
    error = refused(chat.chat, chat_of(*twenty, of_chat(data_url(CAT))))
    assert error.param == "messages[0].content[20].image_url.url"
    assert "is one image too many: a request may have 20" in str(error)


def test_the_pixels_of_a_request_and_the_time_that_they_take_are_bounded(monkeypatch):
    monkeypatch.setattr("api.generation.request_images.MAX_PIXEL_BYTES", 11)
    body = chat_of(of_chat(data_url(CAT)), of_chat(data_url(DOG)))
    error = refused(chat.chat, body)
    assert error.param == "messages[0].content[1].image_url.url"
    assert "may have 11 bytes of pixels. Given: 12" in str(error)
    monkeypatch.setattr("api.generation.request_images.MAX_PREPROCESSING_S", 0.0)
    error = refused(chat.chat, body)
    assert error.param == "messages[0].content[0].image_url.url"
    assert "may take 0 s to preprocess" in str(error)


def test_a_client_that_disconnects_stops_the_work_on_its_images():
    class Gone(Exception):
        pass

    checks = []

    def check():
        checks.append(1)
        if len(checks) == 2:
            raise Gone

    served = serving()
    served.images.preprocess.files.clear()
    data = fields.parse_body(json.dumps(chat_of(of_chat(data_url(CAT)), of_chat(data_url(DOG)))).encode())
    with pytest.raises(Gone), served.images:
        chat.chat(data, served)
        served.images.load(check)
    assert served.images.preprocess.files == [CAT]


@pytest.mark.parametrize("busy", [WITH_FETCHED, WITH_PIXELS, None], ids=["files", "pixels", "a slow host"])
def test_a_client_that_disconnects_is_noticed_while_its_request_waits_for_images(busy, monkeypatch):
    class Gone(Exception):
        pass

    def gone():
        raise Gone

    monkeypatch.setattr("api.generation.request_images.fetch_image", lambda *_: CAT if busy else gevent.sleep(60))
    places = [WITH_FETCHED.counter, WITH_PIXELS.counter]
    images = serving().images
    images.add("url", "https://example.com/cat.png")
    with contextlib.ExitStack() as others, gevent.Timeout(20), pytest.raises(Gone):
        for _ in range(busy.counter if busy else 0):
            others.enter_context(busy)
        with images:
            images.load(gone)
    assert [WITH_FETCHED.counter, WITH_PIXELS.counter] == places


@pytest.mark.parametrize(
    ("make", "body", "name"),
    [
        (chat.chat, chat_of(of_chat(data_url(CAT))) | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (tgi.generate, {"inputs": f"![]({data_url(CAT)})", "parameters": {"truncate": 5}}, "truncate"),
        (
            tgi.generate,
            {"inputs": f"![]({data_url(CAT)})", "parameters": {"decoder_input_details": True}},
            "decoder_input_details",
        ),
    ],
)
def test_what_is_not_supported_with_images_is_refused_by_name_before_they_are_read(make, body, name):
    served = serving()
    served.images.preprocess.files.clear()
    with pytest.raises(ApiError) as error, loaded(make, body, served):
        pass
    assert (error.value.param, served.images.preprocess.files) == (name, [])
    assert str(error.value).endswith("is not supported in a request with images")


def test_an_image_that_does_not_fit_into_the_context_says_how_many_tokens_it_takes():
    with pytest.raises(ApiError) as error:
        tokenized(chat.chat, chat_of(of_chat(data_url(b"x" * 110)), of_chat(data_url(CAT))), serving())
    assert error.value.code == "context_length_exceeded"
    assert "Given: 122 (113 of them for 2 images)" in str(error.value)
    with pytest.raises(ApiError) as error:
        tokenized(tgi.generate, {"inputs": f"![]({data_url(b'x' * 110)})"}, serving())
    assert "Given: 112 (110 of them for 1 image)" in str(error.value)


# Routes that count


def answered(make, body):
    """The body of a response without generated text."""
    with loaded(make, body, serving()) as respond:
        return respond()


def test_the_routes_that_count_count_image_tokens():
    url = data_url(CAT)
    expected = len("u:a[") + len(CAT) + len("]b;a:")
    _, body = as_message(url)
    assert answered(messages.count_tokens, {"messages": body["messages"]}).input_tokens == expected
    _, body = as_response(url)
    assert answered(responses.input_tokens, body).input_tokens == expected
    _, body = as_chat(url)
    counted = answered(tokenize.tokenize, body)
    assert (counted.count, counted.tokens.count(IMAGE_ID)) == (expected, len(CAT))
    listed = answered(tokenize.chat_tokenize, body)
    assert [token.text for token in listed.tokenize_response].count(IMAGE) == len(CAT)
    assert listed.templated_text == f"u:a{A}b;a:"
    listed = answered(tokenize.tokenize, {"inputs": f"a![]({url})b"})
    assert [token.text for token in listed] == ["a", "[", *[IMAGE] * len(CAT), "]", "b"]


def test_the_headers_count_the_characters_that_the_client_wrote():
    prepared = tokenized(*as_chat(data_url(CAT)), serving()).prepared
    assert prepared.characters == len(f"u:a{IMAGE}b;a:")


# Through a server, whose worker gets the tokens of images as negative ids


def test_a_client_cannot_write_what_a_template_writes_for_an_image_if_that_is_another_token(tmp_path, monkeypatch):
    tokenizer = image_tokenizer(tmp_path)
    tokenizer.add_special_tokens([AddedToken("<start>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(FakePreprocessor, "reserved_ids", {IMAGE_ID, IMAGE_ID + 1})
    monkeypatch.setattr("api.generation.prepared_request.ImagePreprocessor", lambda *_: FakePreprocessor())
    info = msgspec.structs.replace(SEEING, tokenizer_dir=str(tmp_path), model_dir=str(tmp_path), vocab_size=IMAGE_ID + 2)
    read = ModelText.load(info, CONFIG).tokenizer
    assert read.encode("<start>", False) == [IMAGE_ID + 1]
    assert len(read.encode(read.escape("<start>"), False)) == len("<start>")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    served = Running(tmp_path_factory.mktemp("seeing"), payload_limit=20_000, allowed_media_domains=("example.com",))
    image_tokenizer(served.folder)
    (served.folder / "chat_template.jinja").write_text(
        PARTS + SERVERS_TEMPLATE.replace("{{ m.content }}", "{{ parts(m.content) }}")
    )
    served.info = msgspec.structs.replace(served.info, vocab_size=IMAGE_ID + 1, reads_images=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("api.generation.prepared_request.ImagePreprocessor", lambda *_: FakePreprocessor())
        served.get_ready()
    yield served
    served.assert_idle()
    served.close()


@pytest.fixture
def submitted(seeing, monkeypatch):
    """The requests and the images that went to the worker."""
    sent = []
    submit = seeing.seen.submit

    def record(generates, messages, images):
        sent.append((generates, images))
        submit(generates, messages, images)

    monkeypatch.setattr(seeing.seen, "submit", record)
    return sent


def test_only_images_may_be_longer_than_the_text_of_a_model_without_them(monkeypatch):
    monkeypatch.setattr("config.TEXT_PAYLOAD", 30)
    served = serving()
    make, body = as_chat(data_url(b"an image"))
    assert len(tokenized(make, body, served).ids) < 30 < len(prompt_of(make, body))
    for parameters in ({}, {"truncate": 5}):
        with pytest.raises(ApiError) as refused:
            prompts_of(tgi.generate({"inputs": " " * 31, "parameters": parameters}, served).requests, served)
        assert refused.value.status == 413 and "at most 30 bytes; --payload-limit raises it" in str(refused.value)


ROUTES = {
    "chat": ("/v1/chat/completions", as_chat, {"max_tokens": 5, "temperature": 0}),
    "messages": ("/v1/messages", as_message, {"max_tokens": 5, "temperature": 0}),
    "responses": ("/v1/responses", as_response, {"max_output_tokens": 5, "temperature": 0}),
    "native": ("/generate", as_native, {"parameters": {"max_new_tokens": 5, "details": True}}),
    "native list": ("/", as_native, {"parameters": {"max_new_tokens": 5, "details": True}}),
    "sagemaker": ("/invocations", as_chat, {"max_tokens": 5, "temperature": 0}),
}


def generated(body):
    """The text of any API's response."""
    if isinstance(body, list):
        (body,) = body
    if "choices" in body:
        return body["choices"][0]["message"]["content"]
    blocks = body["output"][0]["content"] if "output" in body else body.get("content")
    return blocks[0]["text"] if blocks else body["generated_text"]


@pytest.mark.parametrize(("route", "asked", "options"), ROUTES.values(), ids=ROUTES)
def test_a_response_follows_from_the_ids_of_the_image(seeing, submitted, route, asked, options):
    _, body = asked(data_url(CAT))
    response = seeing.post(route, body | options)
    assert response.status_code == 200, response.json
    (((generate,), (image,)),) = submitted
    assert [i for i in generate.prompt if i < 0] == list(image.ids)
    assert image.key == key_of(CAT)
    ids = greedy(generate.prompt, 5, VOCABULARY)
    text = seeing.tokenizer.decode([i for i in ids if i])
    prefix = body["inputs"] if route == "/" else ""
    assert generated(response.json) == prefix + text
    assert response.headers["x-prompt-tokens"] == str(len(generate.prompt))
    usage = (response.json if isinstance(response.json, dict) else {}).get("usage", {})
    counts = {usage.get("prompt_tokens"), usage.get("input_tokens")} - {None}
    assert counts <= {len(generate.prompt)}


def test_an_image_is_sent_once_for_all_sequences(seeing, submitted):
    image = of_chat(data_url(CAT))
    response = seeing.post("/v1/chat/completions", chat_of(image, image) | {"n": 2, "max_tokens": 2, "return_token_ids": True})
    ((generates, images),) = submitted
    assert len(generates) == 2 and len(images) == 1
    assert [i for i in generates[1].prompt if i < 0] == [*images[0].ids, *images[0].ids]
    assert response.json["prompt_token_ids"].count(IMAGE_ID) == 2 * len(CAT)
    assert response.json["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * len(CAT)


def test_a_body_with_images_is_read_and_prepared_once(seeing, monkeypatch):
    counts = Counter()
    for name in ("parse_body", "read"):
        count_calls(monkeypatch, counts, fields, name)
    count_calls(monkeypatch, counts, ChatTemplate, "render")
    count_calls(monkeypatch, counts, conversation, "PreparedRequest")
    body = chat_of(of_chat(data_url(CAT)), of_chat(data_url(DOG))) | {"max_tokens": 1}
    assert seeing.post("/v1/chat/completions", body).status_code == 200
    assert counts == dict.fromkeys(("parse_body", "read", "render", "PreparedRequest"), 1)


def count_calls(monkeypatch, counts, place, name):
    called = getattr(place, name)

    def count(*arguments, **named):
        counts[name] += 1
        return called(*arguments, **named)

    monkeypatch.setattr(place, name, count)


def test_options_of_one_prediction_are_not_those_of_the_next(seeing, submitted):
    chats = [
        chat_of(of_chat(data_url(DOG))) | {"max_tokens": 1, "mm_processor_kwargs": given} for given in ({"max_pixels": 2}, {})
    ]
    assert seeing.post("/vertex", {"instances": chats}).status_code == 200
    ((generates, _images),) = submitted
    assert [len([i for i in generate.prompt if i < 0]) for generate in generates] == [2, 4]


def test_an_image_that_cannot_be_read_is_an_error_in_the_format_of_its_api(seeing):
    """Also on a route of several APIs."""
    _, body = as_chat(data_url(b"bad"))
    for route in ("/v1/chat/completions", "/invocations"):
        response = seeing.post(route, body)
        assert (response.status_code, response.json["error"]["param"]) == (400, "messages[0].content[1].image_url.url")


def test_a_stream_has_the_ids_of_the_models_image_token(seeing, submitted):
    _, body = as_chat(data_url(CAT))
    first, *_ = chunks(seeing, "/v1/chat/completions", body | {"max_tokens": 5, "return_token_ids": True})
    assert first["prompt_token_ids"].count(IMAGE_ID) == len(CAT)
    _, body = as_native(data_url(CAT))
    *_, last = events(seeing.post("/generate_stream", body | {"parameters": {"max_new_tokens": 3, "details": True}}))
    assert last["details"]["input_length"] == len(submitted[-1][0][0].prompt)


def test_a_stored_response_keeps_its_image_and_its_url_is_fetched_again(seeing, submitted, monkeypatch):
    fetched = []

    def fetch(url, domains):
        fetched.append((url, domains))
        return CAT

    monkeypatch.setattr("api.generation.request_images.fetch_image", fetch)
    for url in (data_url(CAT), "https://example.com/cat.png"):
        _, body = as_response(url)
        first = seeing.post("/v1/responses", body | {"max_output_tokens": 2})
        assert first.status_code == 200, first.json
        more = {"input": "c", "previous_response_id": first.json["id"], "max_output_tokens": 2}
        second = seeing.post("/v1/responses", more)
        assert second.status_code == 200, second.json
        assert [image.key for _, (image,) in submitted[-2:]] == [key_of(CAT)] * 2
        assert submitted[-1][0][0].prompt[:9] == submitted[-2][0][0].prompt[:9]
    assert fetched == [("https://example.com/cat.png", ("example.com",))] * 2


def test_what_a_url_leads_to_is_bounded_in_all_and_fetched_once(seeing, monkeypatch):
    urls = []

    def fetch(url, domains):
        urls.append(url)
        if "gone" in url:
            raise ImageUrlError("leads to status 404")
        return CAT

    monkeypatch.setattr("api.generation.request_images.fetch_image", fetch)
    cat = of_chat("http://example.com/cat")
    assert seeing.post("/v1/chat/completions", chat_of(cat, cat) | {"max_tokens": 1}).status_code == 200
    assert urls == ["http://example.com/cat"]
    refused = seeing.post("/v1/chat/completions", chat_of(cat, of_chat("http://example.com/gone")))
    assert refused.status_code == 400
    error = refused.json["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert error["message"].endswith("` leads to status 404. Given: 'http://example.com/gone'")
    monkeypatch.setattr("api.generation.request_images.MAX_FETCHED", 5)
    refused = seeing.post("/v1/chat/completions", chat_of(cat, of_chat("http://example.com/dog")))
    assert "may have 5 bytes. Given: 6" in refused.json["error"]["message"]


@pytest.mark.parametrize("first", ["too much", "not found"])
def test_files_are_no_longer_fetched_once_the_request_is_refused(seeing, monkeypatch, first):
    """Else a request would hold twenty files of the largest size before it is refused."""
    ended = []

    def fetch(url, domains):
        if url.endswith("not found"):
            raise ImageUrlError("leads to status 404")
        if url.endswith("too much"):
            return CAT
        try:
            gevent.sleep(60)
        finally:
            ended.append(url)

    monkeypatch.setattr("api.generation.request_images.fetch_image", fetch)
    monkeypatch.setattr("api.generation.request_images.MAX_FETCHED", 2)
    slow = [of_chat(f"http://example.com/{n}") for n in range(3)]
    begun_at = time.monotonic()
    refused = seeing.post("/v1/chat/completions", chat_of(*slow, of_chat(f"http://example.com/{first}")))
    assert refused.json["error"]["param"] == "messages[0].content[3].image_url.url"
    assert len(ended) == 3 and time.monotonic() - begun_at < 30


def test_an_item_reference_and_images_stand_in_one_request(seeing, submitted):
    _, body = as_response(data_url(CAT))
    first = seeing.post("/v1/responses", body | {"max_output_tokens": 2, "temperature": 0}).json
    again = {"input": [*body["input"], {"type": "item_reference", "id": first["output"][0]["id"]}], "max_output_tokens": 2}
    response = seeing.post("/v1/responses", again)
    assert response.status_code == 200, response.json


def test_counts_models_and_info_know_images(seeing):
    _, body = as_chat(data_url(CAT))
    assert seeing.post("/tokenize", body).json["tokens"].count(IMAGE_ID) == len(CAT)
    assert IMAGE_ID not in seeing.post("/tokenize", {"prompt": IMAGE}).json["tokens"]
    (card,) = seeing.client.get("/v1/models").json["data"]
    assert card["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert seeing.client.get("/info").json["input_modalities"] == ["text", "image"]


def test_vertex_and_plain_text_take_images_too(seeing, submitted):
    _, native = as_native(data_url(CAT))
    _, chat_body = as_chat(data_url(DOG))
    instances = [native | {"parameters": {"max_new_tokens": 2}}, chat_body | {"max_tokens": 2, "temperature": 0}]
    response = seeing.post("/vertex", {"instances": instances})
    assert response.status_code == 200, response.json
    ((generates, images),) = submitted
    assert [image.key for image in images] == [key_of(CAT), key_of(DOG)]
    assert [len([i for i in generate.prompt if i < 0]) for generate in generates] == [3, 4]
    response = seeing.client.post("/invocations", data=native["inputs"], content_type="text/plain")
    assert response.status_code == 200 and len(response.get_data()) >= 0
    assert [image.key for image in submitted[-1][1]] == [key_of(CAT)]


def test_a_request_that_is_over_makes_room_for_the_next():
    for file in (CAT, b"bad"):
        with contextlib.suppress(ApiError):
            tokenized(chat.chat, chat_of(of_chat(data_url(file))), serving())
        assert WITH_PIXELS.counter == 2


@pytest.mark.parametrize("files", [[CAT, DOG], [CAT, b"bad"], [CAT, b"x" * 70]], ids=["served", "refused", "too long"])
def test_no_pixels_stay_in_memory_when_a_request_is_over(seeing, monkeypatch, files):
    """Without the garbage collector, whose next full run may come much later."""
    made = []
    preprocess = FakePreprocessor.__call__

    def record(self, *arguments):
        read = preprocess(self, *arguments)
        made.append(read.pixels)
        return read

    monkeypatch.setattr(FakePreprocessor, "__call__", record)
    gc.disable()
    try:
        seeing.post("/v1/chat/completions", chat_of(*[of_chat(data_url(file)) for file in files]) | {"max_tokens": 1})
        assert made
        # The references are those of the list, the loop and the call.
        wait_until(lambda: {sys.getrefcount(pixels) for pixels in made} == {3})
    finally:
        gc.enable()
