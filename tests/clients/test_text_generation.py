"""text-generation, the client that TGI itself came with: the strictest reader of TGI's shapes."""

import asyncio

import pytest
from demo_server import ANSWER, ANSWER_TOKENS, CHAT_ANSWER, CHAT_ANSWER_TOKENS, QUESTION, QUESTION_TOKENS
from text_generation import AsyncClient, Client
from text_generation.errors import OverloadedError, ValidationError
from text_generation.types import FinishReason, Message

ALL = 1000  # tokens; the client asks for 20 unless told


@pytest.fixture(scope="module")
def client(url):
    return Client(url, timeout=60)


def test_a_text_is_generated_with_its_details(client):
    response = client.generate(QUESTION, max_new_tokens=ALL)
    assert response.generated_text == ANSWER
    details = response.details
    assert (details.finish_reason, details.generated_tokens) == (FinishReason.EndOfSequenceToken, ANSWER_TOKENS)
    assert len(details.tokens) == ANSWER_TOKENS
    assert details.prefill == []


def test_the_tokens_of_the_prompt_come_when_asked(client):
    details = client.generate(QUESTION, max_new_tokens=1, decoder_input_details=True).details
    assert len(details.prefill) == QUESTION_TOKENS
    assert "".join(token.text for token in details.prefill) == QUESTION


def test_a_stream_comes_token_by_token_and_ends_with_the_whole_text(client):
    *events, last = client.generate_stream(QUESTION, max_new_tokens=ALL)
    assert len(events) == ANSWER_TOKENS - 1
    assert "".join(event.token.text for event in events) == ANSWER
    assert last.token.special
    assert last.generated_text == ANSWER
    assert last.details.finish_reason == FinishReason.EndOfSequenceToken


def test_a_stop_sequence_and_a_limit_are_told_as_what_they_are(client):
    stopped = client.generate(QUESTION, max_new_tokens=ALL, stop_sequences=[" neural"])
    assert (stopped.details.finish_reason, stopped.generated_text[-7:]) == (FinishReason.StopSequence, " neural")
    assert client.generate(QUESTION, max_new_tokens=3).details.finish_reason == FinishReason.Length


def test_best_of_tells_the_others_too(client):
    details = client.generate(QUESTION, best_of=2, do_sample=True).details
    assert len(details.best_of_sequences) == 1


def test_a_seed_gives_the_same_text_again_and_is_told(client):
    sampling = {"do_sample": True, "temperature": 1.5, "seed": 1}
    first = client.generate(QUESTION, **sampling)
    assert first.details.seed == 1
    assert client.generate(QUESTION, **sampling).generated_text == first.generated_text
    assert client.generate(QUESTION, **(sampling | {"seed": 2})).generated_text != first.generated_text


def test_top_n_tokens_come_with_each_token(client):
    details = client.generate(QUESTION, max_new_tokens=2, top_n_tokens=3).details
    assert [len(top) for top in details.top_tokens] == [3, 3]
    assert [top[0].id for top in details.top_tokens] == [token.id for token in details.tokens]


def test_a_limit_beyond_the_window_is_a_validation_error(client):
    with pytest.raises(ValidationError, match="`max_new_tokens` must be <= 1024"):
        client.generate(QUESTION, max_new_tokens=5000)
    with pytest.raises(ValidationError, match="`max_new_tokens` must be <= 1024"):
        list(client.generate_stream(QUESTION, max_new_tokens=5000))


def test_a_busy_server_is_an_overloaded_error(client, busy):
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        client.generate(QUESTION, best_of=2, do_sample=True)


def test_a_chat_is_answered(client):
    output = client.chat([Message(role="user", content=QUESTION)], temperature=1e-6, max_tokens=ALL)
    (choice,) = output.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", CHAT_ANSWER, "stop")
    assert output.usage["completion_tokens"] == CHAT_ANSWER_TOKENS


def test_the_async_client_generates_and_streams(url):
    async def ask():
        client = AsyncClient(url, timeout=60)
        whole = await client.generate(QUESTION, max_new_tokens=ALL)
        streamed = [event async for event in client.generate_stream(QUESTION, max_new_tokens=ALL)]
        return whole.generated_text, streamed[-1].generated_text

    assert asyncio.run(ask()) == (ANSWER, ANSWER)
