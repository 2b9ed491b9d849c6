"""Images of clients are preprocessed in child processes, and are known by keys."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from image_files import noise, png, save_preprocessor, saved, turned
from PIL import Image
from processes import wait_until

import text.images.preprocessor
from protocol import MAX_IMAGE_TOKENS
from run import HERE, ConfigError
from text.images.preprocessor import ImagePreprocessor
from text.limited import LimitExceeded, Rejected

pytestmark = pytest.mark.processes


@pytest.fixture
def load(tmp_path):
    def load(name, max_tokens=10_000, **overrides):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        save_preprocessor(name, folder)
        return ImagePreprocessor(folder, overrides, max_tokens)

    return load


def test_an_image_is_its_tiles_and_what_stands_for_it_in_a_prompt(load):
    preprocess = load("llava_next")
    assert (preprocess.placeholder, preprocess.token_id) == ("<image>", 7)
    left = Image.new("RGB", (800, 400), (255, 0, 0))
    left.paste((0, 0, 255), (400, 0, 800, 400))
    image = preprocess(saved(left, "PNG", exif=turned()))  # red above, blue below
    assert image.text == "<image>" * image.tokens
    assert (image.shape, image.canvas, image.tokens) == ((3, 336, 336), (48, 24, 0, 0, 48, 24), 576 + 48 * 25)
    whole, above, below = (image.pixels[n : n + 336 * 336 * 3] for n in range(0, len(image.pixels), 336 * 336 * 3))
    assert (above[:3], below[-3:]) == (b"\xff\0\0", b"\0\0\xff")
    assert (whole[:3], whole[-3:]) == (b"\xff\0\0", b"\0\0\xff")


def test_what_a_template_writes_for_an_image_may_be_another_token_and_clients_may_write_neither(load, tmp_path):
    preprocess = load("gemma3")
    assert preprocess.placeholder == "<start_of_image>"
    assert preprocess(saved(noise(40, 30), "PNG")).text.count(preprocess.placeholder) == 1
    assert (preprocess.reserved_ids, load("llava").reserved_ids) == ({7, 8}, {7})


def test_a_key_is_of_the_file_and_of_how_it_is_read(load):
    data = saved(noise(40, 30), "PNG")
    preprocess = load("internvl")
    keys = [preprocess(data).key, preprocess(data, preprocess.one_tile).key, preprocess(saved(noise(40, 30, 1), "PNG")).key]
    keys.append(load("internvl", max_patches=3)(data).key)
    assert len(set(keys)) == 4
    assert all(key < 2**46 for key in keys)
    assert preprocess(data).key == load("internvl")(data).key == keys[0]


def test_a_request_overrides_what_its_images_are_preprocessed_with(load):
    data = saved(noise(560, 560), "PNG")
    preprocess = load("qwen2_vl", max_pixels=300 * 784)
    small = preprocess(data, options={"max_pixels": 100 * 784})
    assert (preprocess(data).tokens, small.tokens) == (17 * 17, 100)
    assert small.key != preprocess(data).key
    assert preprocess(data, preprocess.one_tile).tokens == 18 * 18
    with pytest.raises(Rejected, match=r"^cannot be preprocessed: .*`max_pixels` must be a positive whole number.*'9'$"):
        preprocess(data, options={"max_pixels": "9"})
    with pytest.raises(Rejected, match=rf"^makes 90000 tokens; at most {MAX_IMAGE_TOKENS} are supported$"):
        preprocess(data, options={"min_pixels": 90_000 * 784, "max_pixels": 10**9})
    with pytest.raises(LimitExceeded):
        preprocess(data, options={"min_pixels": 10**12, "max_pixels": 10**12})
    for name, options in {"qwen2_vl": {"min_pixels": 10**40, "max_pixels": 10**40}, "smolvlm": {"size": 10**400}}.items():
        with pytest.raises(Rejected, match=r"^cannot be preprocessed: the options make it too large$"):
            load(name)(data, options=options)


def test_an_image_that_would_not_fit_the_context_is_scaled_down_where_the_family_can(load, caplog):
    caplog.set_level("DEBUG", "web")
    data = saved(noise(1400, 1400), "PNG")
    assert load("qwen2_vl", max_tokens=30_000)(data).tokens == 2500
    assert "is scaled down" not in caplog.text
    assert load("qwen2_vl", max_tokens=4000)(data).tokens == 2500
    assert 1900 < (tokens := load("qwen2_vl", max_tokens=2600)(data).tokens) <= 1950
    assert "Images of more than 1950 tokens are scaled down: {'max_pixels': 1528800}" in caplog.text
    assert f"An image of 1400 x 1400 pixels is scaled down to 1232 x 1232: {tokens} tokens" in caplog.text
    assert load("llava", max_tokens=100)(data).tokens == 576
    size = {"shortest_edge": 3136, "longest_edge": 100 * 784}
    assert load("qwen2_vl", max_tokens=2600)(data, options={"size": size}).tokens <= 100


def test_a_large_image_has_at_most_4096_tokens_unless_the_settings_allow_more(load):
    data = saved(noise(2600, 2600), "JPEG")
    assert 4000 < load("qwen2_5_vl", max_tokens=30_000)(data).tokens <= 4096
    assert load("qwen2_5_vl", max_tokens=30_000, max_pixels=10**8)(data).tokens == 93 * 93
    assert 4000 < load("qwen2_5_vl", max_tokens=30_000, min_pixels=784)(data).tokens <= 4096
    assert load("qwen2_5_vl", max_tokens=30_000, min_pixels=5000 * 784)(data).tokens == 70 * 70
    assert load("qwen2_5_vl", max_tokens=30_000)(data, options={"max_pixels": 5000 * 784}).tokens > 4096


def test_low_detail_changes_nothing_where_a_family_has_no_other(load):
    data = saved(noise(400, 300), "PNG")
    preprocess = load("pixtral")
    assert preprocess(data, preprocess.one_tile) == preprocess(data)


def test_processes_that_are_forked_agree_on_keys_and_others_do_not(load, monkeypatch):
    preprocess = load("llava")
    data = saved(noise(40, 30), "PNG")
    key = preprocess(data).key
    code = (
        "import os, text.images.preprocessor; os.fork(); os.write(1, text.images.preprocessor.SECRET.hex().encode() + b'\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    first, second = ran.stdout.split()
    assert first == second
    monkeypatch.setattr(text.images.preprocessor, "SECRET", bytes.fromhex(first))
    assert preprocess(data).key != key


def test_what_is_wrong_with_a_file_follows_on_its_name(load):
    preprocess = load("llava")
    with pytest.raises(Rejected, match=r"^is not a PNG, JPEG, WebP or GIF image$"):
        preprocess(b"hello")
    assert preprocess(saved(noise(9, 9), "PNG")).tokens == 576


def test_an_image_that_takes_too_much_ends_its_child_alone(load, monkeypatch):
    large = png(7000, 7000)
    monkeypatch.setattr(text.images.preprocessor, "CPU_S", 0.2)
    with pytest.raises(LimitExceeded, match=r"^takes longer than 0\.2 s of processor time$"):
        load("llava")(large)
    monkeypatch.undo()
    monkeypatch.setattr(text.images.preprocessor, "MEMORY_BYTES", 128 * 2**20)
    preprocess = load("llava")
    with pytest.raises(LimitExceeded, match=r"^needs more than 128 MiB of memory$"):
        preprocess(large)
    assert preprocess(saved(noise(9, 9), "PNG")).tokens == 576


def test_the_largest_image_fits_into_the_limits(load):
    assert load("llava")(png(7000, 7000, alpha=True)).pixels == b"\xff" * (336 * 336 * 3)


def test_twenty_bombs_at_once_are_refused_and_an_image_beside_them_is_read(load):
    preprocess = load("llava")
    with ThreadPoolExecutor(2) as threads:  # as many as an API server process has
        bombs = [threads.submit(preprocess, png(9000, 9000)) for _ in range(20)]
        image = threads.submit(preprocess, saved(noise(9, 9), "PNG"))
    assert {str(bomb.exception()) for bomb in bombs} == {"has more than 50,000,000 pixels"}
    assert image.result().tokens == 576


def test_a_folder_that_does_not_fit_is_refused_before_a_child_is_started(load, monkeypatch):
    monkeypatch.setattr("text.images.preprocessor.SandboxedFunction", None)
    with pytest.raises(ConfigError, match="max_patches"):
        load("llava", max_patches=3)


def test_the_child_is_there_before_the_first_image_and_has_imported_pillow(load):
    def children():
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = children()
    preprocess = load("llava")
    (child,) = children() - before
    wait_until(lambda: "PIL/_imaging." in Path(f"/proc/{child}/maps").read_text(), "Pillow is imported")
    assert preprocess(saved(noise(9, 9), "PNG")).tokens == 576
    assert children() - before == {child}
