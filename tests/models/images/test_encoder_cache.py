"""Image embeddings are found by the ids of image tokens, for as long as a request needs them, in bounded memory."""

import random
import threading

import numpy as np
import pytest

from models.images.encoder_cache import EncoderCache, split_ids
from protocol import MAX_IMAGE_TOKENS, Image

WIDTH = 4


def image(key, tokens):
    return Image(key, tokens, (1, 1, 1), b"")


def embeddings_of(key, tokens):
    return np.random.default_rng(key).standard_normal((tokens, WIDTH), np.float32)


def cache_of(entries=(), limit=100):
    """A cache for `limit` embeddings, with those of the images in `entries`: (key, tokens)."""
    cache = EncoderCache(WIDTH, limit * WIDTH * 4)
    for key, tokens in entries:
        cache.add(key, embeddings_of(key, tokens))
    return cache


@pytest.mark.parametrize("key", [0, 1, 2**46 - 1])
def test_the_ids_of_the_message_are_those_that_the_cache_reads(key):
    keys, numbers = split_ids(np.array(image(key, MAX_IMAGE_TOKENS).ids, np.int64))
    assert set(keys.tolist()) == {key}
    assert numbers.tolist() == list(range(MAX_IMAGE_TOKENS))


def test_image_tokens_get_their_embeddings_in_any_part_of_a_prompt():
    cache = cache_of([(5, 3), (2**46 - 1, 2)])
    prompt = np.array([7, *image(5, 3).ids, 8, *image(2**46 - 1, 2).ids, *image(5, 3).ids], np.int64)
    ids, embeddings, places = cache.resolve(prompt[2:8])
    assert ids.tolist() == [0, 0, 8, 0, 0, 0]
    assert places.tolist() == [0, 1, 3, 4, 5]
    first, second = embeddings_of(5, 3), embeddings_of(2**46 - 1, 2)
    assert (embeddings == [first[1], first[2], second[0], second[1], first[0]]).all()
    assert embeddings.dtype == np.float32


def test_a_text_has_no_embeddings():
    text = np.array([3, 0, 4], np.int64)
    ids, embeddings, places = cache_of().resolve(text)
    assert ids.tolist() == [3, 0, 4] and embeddings.shape == (0, WIDTH) and not len(places)


def test_an_image_that_is_not_there_is_an_error():
    with pytest.raises(KeyError):
        cache_of([(5, 3)]).resolve(np.array(image(6, 1).ids, np.int64))


def test_the_least_recently_wanted_embeddings_are_evicted():
    cache = cache_of([(1, 40), (2, 40)])
    cache.pin("requests", {1})
    cache.pin("requests", set())
    cache.add(3, embeddings_of(3, 40))
    assert (1 in cache, 2 in cache, 3 in cache) == (True, False, True)
    assert cache.nbytes == cache.bytes_of(80)


def test_pinned_embeddings_stay_until_the_last_owner_pins_others():
    cache = cache_of(limit=50)
    cache.pin("requests", {1, 2})  # before they are there
    cache.pin(0, {1})  # a slot
    cache.add(1, embeddings_of(1, 40))
    cache.add(2, embeddings_of(2, 40))
    cache.add(3, embeddings_of(3, 10))  # nothing wants it, and there is no room
    assert (1 in cache, 2 in cache, 3 in cache) == (True, True, False)
    cache.pin("requests", {5})
    assert (1 in cache, 2 in cache) == (True, False)
    cache.pin(0, set())
    assert 1 in cache and cache.nbytes == cache.bytes_of(40)
    cache.add(4, embeddings_of(4, 40))
    assert (1 in cache, 4 in cache) == (False, True)


def test_any_order_of_calls_keeps_pinned_embeddings_and_the_limit():
    chance = random.Random(0)
    cache = cache_of(limit=60)
    pins = {owner: set() for owner in ("requests", 0, 1)}
    for _ in range(3000):
        key = chance.randrange(12)
        held = {key for key in range(12) if key in cache}
        event = chance.choice(("add", "pin", "resolve"))
        if event == "add":
            cache.add(key, embeddings_of(key, 1 + key * 3))
            held.add(key)
        elif event == "pin":
            owner = chance.choice(list(pins))
            pins[owner] = set(chance.sample(range(12), chance.randrange(4)))
            cache.pin(owner, pins[owner])
        elif key in cache:
            _ids, found, _places = cache.resolve(np.array(image(key, 1 + key * 3).ids, np.int64))
            assert (found == embeddings_of(key, 1 + key * 3)).all()
        pinned = set().union(*pins.values())
        kept = {key for key in range(12) if key in cache}
        assert held & pinned <= kept <= held
        assert cache.nbytes == cache.bytes_of(sum(1 + key * 3 for key in kept))
        assert cache.nbytes <= cache.limit_bytes or kept <= pinned


def test_one_thread_adds_while_another_one_reads():
    cache = cache_of(limit=20)
    cache.pin("requests", {0})
    cache.add(0, embeddings_of(0, 4))
    ids = np.array(image(0, 4).ids, np.int64)
    stop = threading.Event()

    def add():
        key = 1
        while not stop.is_set():
            cache.add(key, embeddings_of(key, 6))
            key += 1

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(2000):
            assert (cache.resolve(ids)[1] == embeddings_of(0, 4)).all()
            cache.pin(1, {1})
            cache.pin(1, set())
    finally:
        stop.set()
        thread.join()
