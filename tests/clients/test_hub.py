"""huggingface_hub's InferenceClient, in each of the three generations that are in use."""

import asyncio
import re

import pytest
from demo_server import ANSWER, ANSWER_TOKENS, CHAT, CHAT_ANSWER, CHAT_ANSWER_TOKENS, CHAT_TOKENS, QUESTION, QUESTION_TOKENS
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError
from weather import SCHEMA, TOOL, Forecast, GetWeather

END = "<|endoftext|>"  # this client gives the special tokens of a stream too, as they come; TGI sends them as well
SAMPLING = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12, "return_full_text": False}


@pytest.fixture(scope="module")
def client(url):
    return InferenceClient(model=url)


@pytest.fixture(scope="module", params=["", "/v1"])
def chat_client(request, url):
    return InferenceClient(base_url=url + request.param)


def test_a_text_comes_with_its_prompt_unless_it_shall_not(client):
    assert client.text_generation(QUESTION) == QUESTION + ANSWER
    assert client.text_generation(QUESTION, return_full_text=False) == ANSWER


def test_a_base_url_that_ends_in_v1_generates_too(url):
    assert InferenceClient(base_url=f"{url}/v1").text_generation(QUESTION, return_full_text=False) == ANSWER


def test_a_streamed_text_comes_token_by_token(client):
    pieces = list(client.text_generation(QUESTION, stream=True))
    assert len(pieces) == ANSWER_TOKENS
    assert "".join(pieces) == ANSWER + END


def test_details_tell_every_token_with_its_logprob(client):
    output = client.text_generation(QUESTION, details=True, return_full_text=False)
    assert output.generated_text == ANSWER
    assert (output.details.finish_reason, output.details.generated_tokens) == ("eos_token", ANSWER_TOKENS)
    assert "".join(token.text for token in output.details.tokens if not token.special) == ANSWER
    assert all(token.logprob <= 0 for token in output.details.tokens)
    assert output.details.tokens[-1].special
    assert output.details.prefill == []
    assert output.details.seed is None


def test_decoder_input_details_tell_the_tokens_of_the_prompt(client):
    output = client.text_generation(QUESTION, details=True, decoder_input_details=True, max_new_tokens=1)
    prefill = output.details.prefill
    assert "".join(token.text for token in prefill) == QUESTION
    assert len(prefill) == QUESTION_TOKENS
    assert prefill[0].logprob is None
    assert all(token.logprob < 0 for token in prefill[1:])


def test_a_stream_with_details_ends_with_the_reason_and_the_whole_text(client):
    *events, last = client.text_generation(QUESTION, stream=True, details=True, max_new_tokens=5, return_full_text=False)
    assert all(event.generated_text is None and event.details is None for event in events)
    assert last.generated_text == "".join(event.token.text for event in [*events, last])
    assert ANSWER.startswith(last.generated_text)
    assert [event.index for event in [*events, last]] == [1, 2, 3, 4, 5]
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 5)
    assert last.details.input_length == QUESTION_TOKENS


def test_a_stop_sequence_ends_the_text_and_stays_in_it(client):
    asked = {"details": True, "stop": [" neural"], "return_full_text": False}
    output = client.text_generation(QUESTION, **asked)
    assert output.generated_text == ANSWER[: ANSWER.index(" neural")] + " neural"
    assert output.details.finish_reason == "stop_sequence"
    *_, last = client.text_generation(QUESTION, stream=True, **asked)
    assert (last.generated_text, last.details.finish_reason) == (output.generated_text, "stop_sequence")


def test_top_n_tokens_come_with_each_token_the_likeliest_first(client):
    asked = {"details": True, "top_n_tokens": 3, "max_new_tokens": 4}
    whole = client.text_generation(QUESTION, **asked).details
    streamed = list(client.text_generation(QUESTION, stream=True, **asked))
    ids = [[top["id"] for top in tops] for tops in whole.top_tokens]  # this client leaves them dicts; in a stream it does not
    assert [len(top) for top in ids] == [3] * 4
    assert [top[0] for top in ids] == [token.id for token in whole.tokens]
    assert [[top.id for top in event.top_tokens] for event in streamed] == ids


def test_a_seed_gives_the_same_text_again_whole_or_streamed(client):
    first = client.text_generation(QUESTION, seed=1, **SAMPLING)
    assert client.text_generation(QUESTION, seed=1, **SAMPLING) == first
    assert "".join(client.text_generation(QUESTION, seed=1, stream=True, **SAMPLING)) == first
    assert client.text_generation(QUESTION, seed=2, **SAMPLING) != first


def test_best_of_tells_the_others_too_and_none_is_better(client):
    best = client.text_generation(QUESTION, best_of=3, details=True, **SAMPLING).details
    assert len(best.best_of_sequences) == 2
    assert len({best.seed, *(other.seed for other in best.best_of_sequences)}) == 3

    def mean_logprob(sequence):
        return sum(token.logprob for token in sequence.tokens) / len(sequence.tokens)

    assert mean_logprob(best) >= max(mean_logprob(other) for other in best.best_of_sequences)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"temperature": -1.0}, "`temperature` must be strictly positive"),
        ({"top_p": 7.0}, "`top_p` must be"),
        ({"max_new_tokens": 5000}, "tokens \\+ `max_new_tokens` must be <= 1024"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_parameter_is_a_validation_error_that_says_so(client, wrong, told, stream):
    with pytest.raises(ValidationError, match=told):
        list(client.text_generation(QUESTION, stream=stream, **wrong))


def test_a_prompt_that_is_too_long_is_a_validation_error_with_the_numbers(client):
    with pytest.raises(ValidationError, match=r"must have at most 1023 tokens .*Given: \d{4}"):
        client.text_generation("deep learning " * 750)


def test_a_busy_server_is_an_overloaded_error(client, busy):
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        client.text_generation(QUESTION, best_of=2, do_sample=True)


def test_a_chat_is_answered(chat_client):
    output = chat_client.chat_completion(CHAT, temperature=0)
    (choice,) = output.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", CHAT_ANSWER, "stop")
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (CHAT_TOKENS, CHAT_ANSWER_TOKENS)


def test_a_streamed_chat_comes_in_pieces_and_ends_with_its_reason(chat_client):
    *chunks, last = chat_client.chat_completion(CHAT, temperature=0, stream=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) >= CHAT_ANSWER_TOKENS - 1
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == CHAT_ANSWER
    assert last.choices[0].finish_reason == "stop"


def test_a_streamed_chat_tells_its_usage_when_asked(chat_client):
    options = {"include_usage": True}
    *_, last = chat_client.chat_completion(CHAT, temperature=0, stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.completion_tokens == CHAT_ANSWER_TOKENS


def test_logprobs_of_a_chat_come_with_the_likeliest_tokens(chat_client):
    output = chat_client.chat_completion(CHAT, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2)
    tokens = output.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == output.choices[0].message.content
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]
    assert all(token.top_logprobs[0].token == token.token and token.logprob <= 0 for token in tokens)


def test_a_chat_ends_before_its_stop_text_and_after_max_tokens(chat_client):
    stopped = chat_client.chat_completion(CHAT, temperature=0, stop=[" neural"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (CHAT_ANSWER[: CHAT_ANSWER.index(" neural")], "stop")
    cut = chat_client.chat_completion(CHAT, temperature=0, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_text_has_the_form_of_its_grammar(client, stream):
    def generate(kind, value):
        asked = {"grammar": {"type": kind, "value": value}, "max_new_tokens": 200, "return_full_text": False}
        return "".join(client.text_generation(QUESTION, stream=stream, **asked)).removesuffix(END)

    Forecast.model_validate_json(generate("json", SCHEMA))
    assert re.fullmatch("(rain|sun) [0-9]{2}", generate("regex", "(rain|sun) [0-9]{2}"))


@pytest.mark.parametrize(
    "form",
    [{"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}, {"type": "json_object", "value": SCHEMA}],
    ids=lambda form: form["type"],
)
def test_a_chat_has_the_form_of_its_response_format(chat_client, form):
    (choice,) = chat_client.chat_completion(CHAT, temperature=0, max_tokens=200, response_format=form).choices
    assert choice.finish_reason == "stop"
    Forecast.model_validate_json(choice.message.content)


def test_a_tool_is_called_whole_or_streamed(chat_client):
    asked = {"tools": [TOOL], "tool_choice": "GetWeather", "temperature": 0, "max_tokens": 200}
    (call,) = chat_client.chat_completion(CHAT, **asked).choices[0].message.tool_calls
    assert call.function.name == "GetWeather"
    GetWeather.model_validate_json(call.function.arguments)
    chunks = chat_client.chat_completion(CHAT, stream=True, **asked)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "GetWeather"
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments


def test_a_wrong_parameter_of_a_chat_is_an_http_error_with_400(chat_client):
    with pytest.raises(HfHubHTTPError, match=r"`temperature` must be >= 0\.0") as caught:
        chat_client.chat_completion(CHAT, temperature=-1)
    assert caught.value.response.status_code == 400


def test_the_async_client_generates_streams_and_chats_at_once(url):
    async def ask():
        client = AsyncInferenceClient(model=url)

        async def stream():
            return "".join([piece async for piece in await client.text_generation(QUESTION, stream=True)])

        chat = client.chat_completion(CHAT, temperature=0)
        return await asyncio.gather(client.text_generation(QUESTION, return_full_text=False), stream(), chat)

    whole, streamed, chat = asyncio.run(ask())
    assert (whole, streamed, chat.choices[0].message.content) == (ANSWER, ANSWER + END, CHAT_ANSWER)
