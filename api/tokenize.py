"""Texts to tokens and back: `/tokenize` of TGI, vLLM and llama.cpp, `/chat_tokenize`, `/detokenize`."""

from __future__ import annotations

from msgspec import Struct

from api import tgi
from api.chats.conversation import ChatRequest, prepare_chat
from api.generation.prepared_request import Served, encoded
from api.generation.request_images import Later
from api.http import fields
from api.http.errors import invalid
from api.http.fields import Json, require
from text.stream import prompt_texts
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


class TokenizePrompt(Struct):
    """vLLM's body of `/tokenize` for a text."""

    prompt: str
    model: str | None = None  # ignored: one model is served
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest, kw_only=True):
    """vLLM's body of `/tokenize` for a chat."""

    return_token_strs: bool | None = None


class TokenizeContent(Struct):
    """llama.cpp's body of `/tokenize`."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenizeResponse(Struct):
    """vLLM's."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(Struct):
    """`piece` is a text, or the bytes of a part of a character."""

    id: int
    piece: str | list[int]


class ContentTokens(Struct):
    """llama.cpp's."""

    tokens: list[int | TokenPiece]


class DetokenizeRequest(Struct):
    tokens: list[int]
    model: str | None = None  # ignored: one model is served


class DetokenizeResponse(Struct):
    """The text under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str


def tokenize(data: Json, served: Served) -> Later:
    """Checks a body, and returns the function that lists the tokens of its text or chat once the images are
    loaded. The first field of TOKENIZE that the body has identifies the API, and so the form of the list.
    Adds images to `served.images`, and waits for a child process that renders a chat. Raises ApiError, as
    that function does, for fields that are wrong, and for texts that are too long to be listed."""
    return fields.choose_variant(data, TOKENIZE)(data, served)


def _inputs(data: Json, served: Served) -> Later:
    text, image_numbers = tgi.prompt_of(tgi.read_generate(data).inputs, served)
    return lambda: _tokens(served.images.expand(text, image_numbers), served, add_special_tokens=True)


def _tokenize_prompt(data: Json, served: Served) -> Later:
    request = fields.read(data, TokenizePrompt)
    text = served.text.tokenizer.escape(request.prompt)
    return lambda: _counted(text, request, request.add_special_tokens is not False, served)


def _tokenize_messages(data: Json, served: Served) -> Later:
    """Checks vLLM's chat, and returns the function that lists its tokens once the images are loaded. Adds the
    images to `served.images`, and waits for a child process that renders the chat. Raises ApiError for a chat
    that is wrong or that the template rejects; the function does so for a text that is too long."""
    request = fields.read(data, TokenizeChat)
    prepared = prepare_chat(request, served)

    def counted() -> TokenizeResponse:
        text = served.images.expand(prepared.prompt, prepared.image_numbers)
        return _counted(text, request, prepared.add_special_tokens, served)

    return counted


def _counted(
    text: str, request: TokenizePrompt | TokenizeChat, add_special_tokens: bool, served: Served
) -> TokenizeResponse:
    """Returns the tokens of an escaped text in vLLM's form, with their texts if the request asks for them.
    Raises ApiError for a text of more than MAX_TOKENIZED bytes, and for one that cannot be tokenized."""
    _raw(text, served)
    ids = encoded(text, served, add_special_tokens)
    texts = prompt_texts(served.text.tokenizer, ids) if request.return_token_strs else None
    return TokenizeResponse(len(ids), served.info.max_total_tokens, ids, texts)


def _tokenize_content(data: Json, served: Served) -> Later:
    """Returns the function that makes llama.cpp's list of tokens: ids, or ids with their texts. Raises
    ApiError for fields that are wrong, and for a text of more than MAX_TOKENIZED bytes."""
    request = fields.read(data, TokenizeContent)
    require(request.parse_special is not False, "parse_special", "is not supported if it is false")
    tokenizer = served.text.tokenizer
    text = tokenizer.escape(request.content)
    _raw(text, served)
    ids = encoded(text, served, bool(request.add_special))
    if request.with_pieces:
        ids = [TokenPiece(token_id, _piece(token_id, tokenizer)) for token_id in ids]
    return lambda: ContentTokens(ids)


def _piece(token_id: int, tokenizer: Tokenizer) -> str | list[int]:
    """Returns the text of a token, or its bytes if they are a part of a character."""
    exact = tokenizer.piece_bytes(token_id)
    if exact is None:
        return tokenizer.token_text(token_id)
    try:
        return exact.decode()
    except UnicodeDecodeError:
        return list(exact)


TOKENIZE = {
    "inputs": _inputs,
    "prompt": _tokenize_prompt,
    "messages": _tokenize_messages,
    "content": _tokenize_content,
}


def detokenize(data: Json, served: Served) -> Later:
    """Returns the function that makes the response: the joined texts of tokens; special tokens show their
    names. Raises ApiError for fields that are wrong, for more than MAX_LISTED_TOKENS ids, and for one that
    the model does not know."""
    tokens = fields.read(data, DetokenizeRequest).tokens
    require(len(tokens) <= MAX_LISTED_TOKENS, "tokens", f"takes up to {MAX_LISTED_TOKENS} tokens")
    fields.check_ids(tokens, "tokens", served.info)
    text = "".join(prompt_texts(served.text.tokenizer, tokens))
    return lambda: DetokenizeResponse(text, text)


def chat_tokenize(data: Json, served: Served) -> Later:
    """Checks a chat, and returns the function that lists its text and tokens once the images are loaded. Adds
    the images to `served.images`, and waits for a child process that renders the chat. Raises ApiError for a
    chat that is wrong or that the template rejects; the function does so for too many tokens."""
    prepared = prepare_chat(fields.read(data, ChatRequest), served)

    def listed() -> ChatTokenizeResponse:
        text = served.images.expand(prepared.prompt, prepared.image_numbers)
        tokens = _tokens(text, served, prepared.add_special_tokens)
        return ChatTokenizeResponse(tokens, served.text.tokenizer.unescape(text))

    return listed


def _tokens(text: str, served: Served, add_special_tokens: bool) -> list[SimpleToken]:
    """Returns the tokens of an escaped text, each with the range of its bytes in the text without escapes. A
    token that the tokenizer adds has the range 0 to 0, and no text. Raises ApiError for more than
    MAX_TOKENIZED bytes or MAX_LISTED_TOKENS tokens, and for a text that cannot be tokenized."""
    raw = _raw(text, served)
    try:
        spans = served.text.tokenizer.spans(text, add_special_tokens, MAX_LISTED_TOKENS)
    except TooManyTokens as error:
        what = f"the text has {error.args[0]} tokens; at most {MAX_LISTED_TOKENS} are listed"
        raise invalid(None, what) from None
    except ValueError as error:
        raise invalid(None, f"tokenizer error: {error}") from None
    return [SimpleToken(i, raw[start:stop].decode(errors="replace"), start, stop) for i, start, stop in spans]


def _raw(text: str, served: Served) -> bytes:
    """Returns the bytes of an escaped text without the escapes. Raises ApiError for more than
    MAX_TOKENIZED."""
    raw = served.text.tokenizer.unescape(text).encode()
    if len(raw) > MAX_TOKENIZED:
        limit = f"a text to tokenize must have at most {MAX_TOKENIZED} bytes"
        raise invalid(None, f"{limit}. Given: {len(raw)}")
    return raw
