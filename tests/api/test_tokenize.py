"""`/tokenize`, `/chat_tokenize` and `/detokenize`: the tokens of a text and of a chat, where each stands, and back."""

import pytest
from fakes.model import EOS
from fakes.tokenizer import VOCABULARY
from openai_api import whole
from served import WINDOW

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_tokenize_tells_where_each_token_stands(served):
    text = "Hé!"
    tokens = whole(served, "/tokenize", {"inputs": text, "parameters": {"truncate": 1}})
    assert [token["id"] for token in tokens] == served.tokenizer.encode(text).ids
    assert tokens[0] == {"id": tokens[0]["id"], "text": "H", "start": 0, "stop": 1}
    assert (tokens[-1]["text"], tokens[-1]["start"], tokens[-1]["stop"]) == ("!", 3, 4)
    assert whole(served, "/tokenize", {"inputs": ""}) == []


def test_chat_tokenize_shows_the_text_that_a_chat_becomes(served):
    answer = whole(served, "/chat_tokenize", CHAT)
    assert answer["templated_text"] == "u:Hi;a:"
    assert [token["text"] for token in answer["tokenize_response"]] == list("u:Hi;a:")


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("MAX_LISTED_TOKENS", 10, "the text has 11 tokens; at most 10 are listed"),
        ("MAX_TOKENIZED", 10, "a text to tokenize must have at most 10 bytes. Given: 11"),
    ],
)
def test_a_text_of_too_many_tokens_is_not_listed_token_by_token(served, monkeypatch, limit, most, words):
    monkeypatch.setattr(f"api.tokenize.{limit}", most)
    assert len(whole(served, "/tokenize", {"inputs": "a" * 10})) == 10
    refused = served.post("/tokenize", {"inputs": "a" * 11})
    assert (refused.status_code, refused.json["error"]) == (422, f"Input validation error: {words}")
    assert served.post("/chat_tokenize", {"messages": [{"role": "user", "content": "a" * 11}]}).status_code == 422


def test_vllms_bodies_are_read(served):
    ids = served.tokenizer.encode("Hé!").ids
    answer = whole(served, "/tokenize", {"model": "m", "prompt": "Hé!"})
    assert answer == {"count": len(ids), "max_model_len": WINDOW, "tokens": ids, "token_strs": None}
    texts = whole(served, "/tokenize", {"prompt": "Hi", "return_token_strs": True, "add_special_tokens": False})
    assert texts["token_strs"] == ["H", "i"]
    chat = whole(served, "/tokenize", CHAT | {"return_token_strs": True})
    assert "".join(chat["token_strs"]) == "u:Hi;a:" and chat["count"] == 7


def test_llama_cpps_body_is_read(served):
    ids = served.tokenizer.encode("Hi").ids
    assert whole(served, "/tokenize", {"content": "Hi"}) == {"tokens": ids}
    pieces = [{"id": i, "piece": piece} for i, piece in zip(ids, "Hi")]
    assert whole(served, "/tokenize", {"content": "Hi", "with_pieces": True}) == {"tokens": pieces}
    split = whole(served, "/tokenize", {"content": "é", "with_pieces": True})["tokens"]
    assert [each["piece"] for each in split] == [[0xC3], [0xA9]]
    assert "`parse_special`" in served.post("/tokenize", {"content": "Hi", "parse_special": False}).json["error"]


def test_tokens_become_text_again(served):
    ids = served.tokenizer.encode("Hé!").ids
    assert whole(served, "/detokenize", {"tokens": ids}) == {"prompt": "Hé!", "content": "Hé!"}
    assert whole(served, "/detokenize", {"tokens": [*ids, EOS]})["prompt"] == "Hé!" + served.tokenizer.id_to_token(EOS)
    assert whole(served, "/detokenize", {"tokens": []})["prompt"] == ""
    for tokens in ([VOCABULARY], [-1], [True], "Hi"):
        refused = served.post("/detokenize", {"tokens": tokens})
        assert refused.status_code == 422 and "tokens" in refused.json["error"]


def test_errors_have_tgis_shape(served):
    for path, body in (
        ("/tokenize", {"input": "a"}),
        ("/tokenize", {"prompt": 5}),
        ("/chat_tokenize", CHAT | {"n": 0}),
        ("/chat_tokenize", b"{"),
    ):
        response = served.post(path, body)
        assert (response.status_code, response.json["error_type"]) == (400 if body == b"{" else 422, "validation")


@pytest.mark.parametrize("route", ["/generate", "/tokenize"])
def test_a_panic_of_the_tokenizers_library_is_an_error_of_the_request(served, monkeypatch, route):
    class PanicException(BaseException):
        """As pyo3 makes of a panic: no Exception."""

    class Panics:
        def encode_batch(self, *_args, **_options):
            raise PanicException("called `Option::unwrap()` on a `None` value")

        encode_batch_fast = encode_batch

    monkeypatch.setattr(served.seen.text.tokenizer, "_tokenizer", Panics())
    response = served.post(route, {"inputs": "a"})
    assert response.status_code == 422
    assert response.json["error"].endswith("tokenizer error: the tokenizer cannot process this text")
