"""TGI's `/tokenize` and `/chat_tokenize`: the tokens of a text, and of a chat as the model reads it."""

from __future__ import annotations

from msgspec import Struct

from api import fields, tgi
from api.conversation import ChatRequest, prepare_chat
from api.errors import invalid
from api.fields import Json
from api.prepared_request import Served
from text.tokenizer import Tokenizer, TooManyTokens

MAX_TOKENIZED = 500_000  # bytes of a text, each of which may be a token that takes 250 bytes
MAX_LISTED_TOKENS = 100_000  # of a response, which then has 4 MB


class SimpleToken(Struct):
    """A token of a text, and the range of its bytes in the text's UTF-8."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct):
    tokenize_response: list[SimpleToken]
    templated_text: str


def tokenize(data: Json, served: Served) -> list[SimpleToken]:
    tokenizer = served.text.tokenizer
    return _tokens(tokenizer.escape(tgi.read(data).inputs), tokenizer, add_special_tokens=True)


def chat_tokenize(data: Json, served: Served) -> ChatTokenizeResponse:
    tokenizer = served.text.tokenizer
    text = prepare_chat(fields.read(data, ChatRequest), served).prompt
    tokens = _tokens(text, tokenizer, add_special_tokens=False)
    return ChatTokenizeResponse(tokens, tokenizer.unescape(text))


def _tokens(text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[SimpleToken]:
    try:
        raw = tokenizer.unescape(text).encode()
        if len(raw) > MAX_TOKENIZED:
            limit = f"a text to tokenize must have at most {MAX_TOKENIZED} bytes"
            raise invalid(None, f"{limit}. Given: {len(raw)}")
        spans = tokenizer.spans(text, add_special_tokens, MAX_LISTED_TOKENS)
    except TooManyTokens as error:
        what = f"the text has {error.args[0]} tokens; at most {MAX_LISTED_TOKENS} are listed"
        raise invalid(None, what) from None
    except ValueError as error:
        raise invalid(None, f"tokenizer error: {error}") from None
    return [SimpleToken(i, raw[start:stop].decode(errors="replace"), start, stop) for i, start, stop in spans]
