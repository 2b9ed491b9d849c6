"""Images by URL: what a `data:` URL holds, and which URLs are fetched."""

import base64

import pytest

from api import image_urls
from api.image_urls import ImageUrlError, read_base64, read_data_url

PNG = b"\x89PNG\r\n\x1a\n\xff\xfb"


def data_url(data=PNG, head="data:image/png;base64,"):
    return head + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "head", ["data:image/png;base64,", "data:;base64,", "DATA:text/html;BASE64,", "data:image/jpeg;name=a.jpg;base64,"]
)
def test_a_data_url_is_its_data_whatever_its_type_says(head):
    assert read_data_url(data_url(head=head)) == PNG


NOT_DATA = {
    "not base64": ("data:image/png,abc", "must be a `data:` URL in base64"),
    "no comma": ("data:image/png;base64", "must be a `data:` URL in base64"),
    "another scheme": ("https://example.com/;base64,QQ==", "must be a `data:` URL in base64"),
    "empty": ("data:image/png;base64,", "has no data"),
    "line breaks": ("data:image/png;base64,QUJD\nQUJD", "is not base64"),
    "url alphabet": ("data:image/png;base64,-_-_", "is not base64"),
    "no padding": ("data:image/png;base64,QQ", "is not base64"),
    "padding inside": ("data:image/png;base64,QQ==QQ==", "is not base64"),
    "not ASCII": ("data:image/png;base64,QQÖ=", "is not base64"),
    "percent-encoded": ("data:image/png;base64,QQ%3D%3D", "is not base64"),
}


@pytest.mark.parametrize("name", NOT_DATA)
def test_what_is_no_data_url_in_base64_is_refused_with_a_sentence(name):
    url, words = NOT_DATA[name]
    with pytest.raises(ImageUrlError, match=words):
        read_data_url(url)


def test_data_of_too_many_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_BYTES", 9)
    for most in (b"x" * 9, b"x" * 8):
        assert read_base64(base64.b64encode(most).decode()) == most
    for many in (b"x" * 10, b"x" * 12, b"x" * 1000):
        with pytest.raises(ImageUrlError, match="has more than the 9 bytes"):
            read_base64(base64.b64encode(many).decode())
