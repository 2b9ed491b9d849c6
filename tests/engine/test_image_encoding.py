"""The images of requests: each is encoded once, beside the steps of others, and kept for as long as a request wants it."""

import random

import pytest
from fakes.model import ImageModel, greedy, image
from loop import ENGINES, Driven, on_every_engine
from processes import wait_until

from engine import admission
from engine.link import PeerLost
from engine.request import RequestState
from protocol import Cancel, End, Generate, SubmitRequests
from text.grammar import GrammarError

WAIT_S = 60


def prompt_with(*images):
    return [7, *(i for each in images for i in (*each.ids, 8))]


def asks(number, *images, most=3, n=1, **options):
    """A message of an HTTP request about images; with `n`, of so many sequences."""
    prompt = prompt_with(*images)
    return SubmitRequests([Generate(number + i, prompt, most, **options) for i in range(n)], list(images))


def expected(*images, most=3):
    return greedy(prompt_with(*images), most)


def driven_with(cached_tokens=1000, **options):
    on_worker = {name: options.pop(name) for name in ("grammars", "max_concurrent_requests") if name in options}
    return Driven(served=ImageModel(cached_tokens, **options), **on_worker)


def wait_for_encoder(driven):
    wait_until(lambda: driven.wire.arrivals, "an encoded image")


def failures_of(driven):
    ends = [message for _peer, message in driven.wire.sent if isinstance(message, End)]
    return {end.id: end.message for end in ends if end.reason == "failed"}


def is_clean(driven):
    """Nothing is kept for requests that have ended."""
    driven.worker._preparation.start()
    cache = driven.model.encoder_cache
    return driven.admission.pixel_bytes == 0 and not any(cache._pins.values()) and cache.nbytes <= cache.limit_bytes


@on_every_engine
def test_a_request_about_an_image_gets_the_tokens_of_its_prompt(engine):
    driven = driven_with(**engine)
    driven.arrive(asks(1, image(5)), asks(2, image(6, tokens=9), image(2**46 - 1)))
    driven.run()
    assert driven.tokens[1] == expected(image(5))
    assert driven.tokens[2] == expected(image(6, tokens=9), image(2**46 - 1))
    assert is_clean(driven)
    assert driven.model.encoder_cache.canvas_of(6) == image(6, tokens=9).canvas


def test_others_generate_while_an_image_is_encoded_which_counts_as_waiting():
    driven = driven_with()
    driven.model.may_encode.clear()
    driven.arrive(Generate(1, [1], 5, ignore_eos=True), asks(2, image(5)))
    driven.step(5)
    assert driven.ends == {1: "length"}
    assert driven.worker.load()["queue_size"] == 1 and driven.worker.requests.by_id[2].state is RequestState.PREPARING
    driven.model.may_encode.set()
    driven.run()
    assert driven.tokens[2] == expected(image(5))


def test_requests_with_the_same_image_wait_for_one_encoding_and_later_ones_find_it():
    driven = driven_with()
    driven.model.may_encode.clear()
    driven.arrive(asks(1, image(5)), asks(2, image(6), image(5)), asks(3, image(5), n=2))
    driven.step()
    driven.model.may_encode.set()
    driven.run()
    driven.arrive(asks(9, image(6)))
    driven.run()
    assert driven.model.encoded == [5, 5, 6, 6]  # tiles
    assert [driven.tokens[i] for i in (1, 2, 3, 4, 9)] == [
        expected(image(5)),
        expected(image(6), image(5)),
        expected(image(5)),
        expected(image(5)),
        expected(image(6)),
    ]
    assert is_clean(driven)


def test_a_request_waits_for_one_image_of_another_one_and_requests_with_many_take_turns():
    driven = driven_with(cached_tokens=100)
    driven.model.may_encode.clear()
    driven.arrive(asks(1, *(image(10 + n) for n in range(4))))
    driven.step()
    assert driven.model.began.acquire(timeout=WAIT_S)  # of its first image
    driven.arrive(asks(2, image(50)), asks(3, *(image(30 + n) for n in range(3))))
    driven.step()
    driven.model.may_encode.set()
    driven.run()
    order = list(dict.fromkeys(driven.model.encoded))
    assert order == [10, 50, 30, 11, 31, 12, 32, 13]
    assert driven.tokens[1] == expected(*(image(10 + n) for n in range(4))) and driven.tokens[2] == expected(image(50))
    assert is_clean(driven)


@pytest.mark.parametrize("how", ["cancel", "web process gone"])
def test_encoding_ends_at_the_next_tile_once_no_request_wants_the_image(how):
    driven = driven_with()
    driven.model.may_encode.clear()
    driven.arrive(asks(1, image(5, tiles=50)), asks(2, image(6)), asks(3, image(7)), peer=b"lost")
    driven.arrive(asks(4, image(7)))
    driven.step()
    assert driven.model.began.acquire(timeout=WAIT_S)
    driven.arrive(*([Cancel(i, "client disconnected") for i in (1, 2, 3)] if how == "cancel" else [PeerLost()]), peer=b"lost")
    driven.step()
    driven.worker._preparation.start()  # as before the loop waits
    assert driven.model.began.acquire(timeout=WAIT_S)  # of the next image that is wanted
    driven.model.may_encode.set()
    driven.run()
    assert driven.model.encoded == [7, 7]
    assert driven.ends == {1: "cancelled", 2: "cancelled", 3: "cancelled", 4: driven.ends[4]}
    assert driven.tokens[4] == expected(image(7))
    assert is_clean(driven)


def test_an_image_whose_encoding_was_cancelled_is_encoded_for_the_next_request():
    driven = driven_with()
    driven.model.may_encode.clear()
    driven.arrive(asks(1, image(5)))
    driven.step()
    assert driven.model.began.acquire(timeout=WAIT_S)
    driven.arrive(Cancel(1, "client disconnected"))
    driven.worker.receive()
    driven.worker._preparation.start()
    wait_for_encoder(driven)  # it has given up, and the loop does not know yet
    driven.model.may_encode.set()
    driven.arrive(asks(2, image(5)))
    driven.run()
    assert driven.tokens[2] == expected(image(5))


def test_an_image_that_cannot_be_encoded_fails_the_requests_that_want_it_alone():
    driven = driven_with()
    driven.model.damaged = {13}
    driven.arrive(asks(1, image(5)), asks(2, image(6), image(13)), asks(3, image(13)), asks(4, image(6)))
    driven.run()
    failures = {
        message.id: message.message for _peer, message in driven.wire.sent if getattr(message, "reason", "") == "failed"
    }
    assert failures == dict.fromkeys((2, 3), "the image cannot be encoded")
    assert (driven.tokens[1], driven.tokens[4]) == (expected(image(5)), expected(image(6)))
    driven.model.damaged = set()
    driven.arrive(asks(5, image(13)))
    driven.run()
    assert driven.tokens[5] == expected(image(13))
    assert is_clean(driven)


def test_an_image_with_another_number_of_embeddings_than_tokens_fails_before_a_step():
    driven = driven_with()
    wrong = image(5, tokens=4)
    encode = driven.model.encode
    driven.model.encode = lambda pixels, canvas, is_cancelled: encode(pixels, (canvas[0] - 1,), is_cancelled)
    driven.arrive(asks(1, wrong), Generate(2, [3], 3))
    driven.run()
    assert failures_of(driven) == {1: "the image cannot be encoded"} and driven.tokens[2] == greedy([3], 3)


def test_embeddings_stay_for_as_long_as_a_request_wants_them_whatever_else_is_encoded():
    driven = driven_with(cached_tokens=5, batch_size=4, max_total_tokens=5000)
    cache = driven.model.encoder_cache
    driven.arrive(asks(1, image(5, tokens=3), most=4000, ignore_eos=True))  # steps go on while images are encoded
    driven.run_until_running(1)
    for number, other in (2, image(6, tokens=2)), (3, image(7, tokens=2)):
        driven.arrive(asks(number, other))
        while number not in driven.ends:
            driven.step()
    assert driven.running == [1]
    assert (5 in cache, 6 in cache, 7 in cache) == (True, False, True)
    driven.arrive(Cancel(1, "test"))
    driven.run()
    driven.arrive(asks(4, image(8, tokens=3)))
    driven.run()
    assert (5 in cache, 7 in cache, 8 in cache) == (False, True, True)
    assert is_clean(driven)


def test_encoding_waits_for_memory_that_other_requests_hold():
    driven = driven_with(cached_tokens=6, batch_size=4)
    driven.arrive(asks(1, image(5), most=8, ignore_eos=True))
    driven.run_until_running(1)
    driven.arrive(asks(2, image(6, tokens=4)), asks(3, image(5)), asks(4, image(5)))
    driven.step(2)
    assert 6 not in driven.model.encoded
    driven.run()
    assert driven.model.encoded == [5, 5, 6, 6]
    assert driven.tokens[2] == expected(image(6, tokens=4)) and driven.tokens[3] == driven.tokens[4] == expected(image(5))
    assert is_clean(driven)


def test_a_request_whose_images_exceed_the_encoder_cache_runs_alone():
    driven = driven_with(cached_tokens=6)
    images = [image(5, tokens=5), image(6, tokens=5)]
    driven.arrive(asks(1, *images), asks(2, image(7)))
    driven.run()
    assert driven.tokens[1] == expected(*images) and driven.tokens[2] == expected(image(7))
    assert is_clean(driven)


def test_images_that_wait_are_bounded_and_make_room_when_they_are_encoded_or_cancelled(monkeypatch):
    monkeypatch.setattr(admission, "MAX_WAITING_PIXEL_BYTES", 2 * len(image(1).pixels))
    driven = driven_with()
    driven.model.may_encode.clear()
    driven.arrive(asks(1, image(5)), asks(2, image(6)), asks(3, image(7)), Generate(4, [3], 3))
    driven.step()
    assert driven.ends[3] == "overloaded"
    driven.arrive(Cancel(2, "client disconnected"))
    driven.step()
    driven.worker._preparation.start()
    driven.arrive(asks(5, image(7)))
    driven.model.may_encode.set()
    driven.run()
    assert (driven.ends[2], driven.tokens[1], driven.tokens[5]) == ("cancelled", expected(image(5)), expected(image(7)))
    driven.arrive(asks(6, image(8, tiles=90)))  # more than the bound, alone
    driven.run()
    assert driven.tokens[6] == expected(image(8))
    assert is_clean(driven)


def test_the_pixels_of_an_encoded_image_are_freed_while_the_next_one_is_encoded():
    driven = driven_with()
    driven.model.may_encode.clear()
    first, second = image(5, tiles=1), image(6, tiles=1)
    driven.arrive(asks(1, first, second))
    driven.step()
    encode = driven.model.encode

    def encode_first_only(pixels, canvas, is_cancelled):
        if len(driven.model.encoded) == 1:
            driven.model.may_encode.clear()
            driven.wire.interrupt()
        return encode(pixels, canvas, is_cancelled)

    driven.model.encode = encode_first_only
    driven.model.may_encode.set()
    wait_for_encoder(driven)
    driven.worker._preparation.start()
    assert driven.admission.pixel_bytes == len(second.pixels)
    driven.model.may_encode.set()
    driven.run()
    assert driven.tokens[1] == expected(first, second)
    assert is_clean(driven)


class Rejecting:
    """In the place of Grammars."""

    def matcher(self, grammar):
        raise GrammarError("is wrong")


def test_a_request_fails_by_its_grammar_while_its_image_is_encoded():
    driven = driven_with(grammars=Rejecting())
    driven.model.may_encode.clear()
    driven.arrive(asks(1, image(5), grammar="a"), asks(2, image(5)))
    while not driven.ends:
        driven.step()
    assert driven.ends == {1: "failed"}
    driven.model.may_encode.set()
    driven.run()
    assert driven.tokens[2] == expected(image(5))
    assert is_clean(driven)


def test_images_and_their_embeddings_are_in_the_metrics():
    driven = driven_with()
    driven.arrive(asks(1, image(5), image(6)))
    driven.run()
    driven.arrive(asks(2, image(5), image(7), n=2))
    driven.run()
    text = driven.worker.metrics.render().decode()
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}
    cached_bytes = driven.model.encoder_cache.bytes_of(9)
    assert (found["tgi_images"], found["tgi_encoder_cache_hits"], found["tgi_encoder_cache_bytes"]) == (4, 1, cached_bytes)
    assert found["tgi_image_encode_duration_count"] == 3


@pytest.mark.parametrize("engine", ["supports_chunked_prefill", "chunks"])
def test_a_prefix_is_reused_up_to_the_first_token_of_another_image(engine):
    driven = driven_with(prefix_granularity=2, **ENGINES[engine])
    first, second = image(5, tokens=6), image(6, tokens=6)
    driven.arrive(asks(1, first))
    driven.run()
    driven.arrive(asks(2, first, second))
    driven.run()
    driven.arrive(asks(3, first, image(7, tokens=6)))
    driven.run()
    driven.arrive(asks(4, second))
    driven.run()
    cached = [driven.prompts[i].cached for i in (1, 2, 3, 4)]
    assert cached[0] == cached[3] == 0 and 4 <= cached[1] <= 8 and 4 <= cached[2] <= 8
    assert driven.tokens[2] == expected(first, second)
    assert driven.tokens[3] == expected(first, image(7, tokens=6))


def test_stopping_ends_the_encoder():
    driven = driven_with()
    driven.model.may_encode.clear()
    driven.arrive(asks(1, image(5, tiles=50)), asks(2, image(6)))
    driven.step()
    assert driven.model.began.acquire(timeout=WAIT_S)
    driven.worker.stop()
    driven.worker.run()
    driven.output_thread.catch_up()
    assert driven.ends == {1: "draining", 2: "draining"}
    encoder = driven.worker._preparation.images._thread
    encoder.shutdown(wait=True)  # would wait for ever
    assert not driven.model.encoded


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_each_request_its_tokens_and_leaves_nothing_behind(seed):
    chance = random.Random(seed)
    engine = ENGINES[chance.choice(list(ENGINES))]
    driven = driven_with(cached_tokens=20, prefix_granularity=2 if engine else None, verify_length=3, **engine)
    driven.model.damaged = {13}
    images = [image(key, tokens=1 + key % 7, tiles=1 + key % 4) for key in (1, 2, 3, 5, 13, 2**40 + 6)]
    wants, cancelled = {}, set()
    for number in range(1, 60):
        chosen = chance.sample(images, chance.choice((0, 1, 1, 1, 2)))
        n = chance.choice((1, 1, 2))
        driven.arrive(asks(100 * number, *chosen, n=n))
        wants |= {100 * number + i: chosen for i in range(n)}
        if chance.random() < 0.3:
            driven.model.may_encode.clear()
        if chance.random() < 0.4:
            gone = chance.choice(list(wants))
            cancelled.add(gone)
            driven.arrive(Cancel(gone, "client disconnected"))
        if chance.random() < 0.5:
            driven.model.may_encode.set()
        if driven.wire.arrivals or driven.worker.scheduler.busy:
            driven.step()
    driven.model.may_encode.set()
    driven.run(at_most=3000)
    assert set(driven.ends) == set(wants)
    for number, chosen in wants.items():
        end = driven.ends[number]
        if end == "cancelled":
            assert number in cancelled
        elif end == "failed":
            assert any(each.key == 13 for each in chosen)
        else:
            assert driven.tokens[number] == expected(*chosen)
    assert is_clean(driven)
