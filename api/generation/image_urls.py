"""Images by URL: decodes `data:` URLs, and fetches http and https URLs of the hosts that the operator names.

Raises ImageUrlErrors, whose messages follow the name of a field; does not decode images. Fetches run in
greenlets: the sockets are gevent's.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import io
import ipaddress
import string
from collections.abc import Container
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import gevent
from gevent import socket, ssl
from gevent.lock import BoundedSemaphore

from api.http.bodies import YIELD_S

MAX_IMAGE_BYTES = 20_000_000  # of an image file, and of what a server sends for it
MAX_FETCH_S = 10.0  # for a URL, with its redirects
CONNECT_SECONDS = 3.0  # to one address: a host may have others
MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
PIECE = 65_536  # bytes
UNICAST = ipaddress.ip_network("2000::/3")
STANDARD = bytes.maketrans(b"-_", b"+/")  # from base64's URL-safe alphabet
# What stands percent-encoded in base64, and what it stands for: urllib takes 7 s for 9 million of them.
PERCENT_ENCODED = "%2B %2b %2F %2f %3D %3d %0A %0a %0D %0d %20"
PERCENT_DECODED = "++//==\n\n\r\r "  # the character of each
FETCHES = BoundedSemaphore(8)  # at a time, in an API server process: each may hold MAX_IMAGE_BYTES


class ImageUrlError(Exception):
    """The URL is rejected, or its image cannot be had; the message says why, as in "has no data"."""


def read_data_url(url: str) -> bytes:
    """Returns the file in a `data:` URL. Its media type is ignored: what counts is the content. Raises
    ImageUrlError for a URL that is not a `data:` URL in base64, and for the data that `read_base64`
    rejects."""
    head, comma, data = url.partition(",")
    head = head.lower()
    if not (comma and head.startswith("data:") and "base64" in head):
        raise ImageUrlError("must be a `data:` URL in base64, such as data:image/png;base64,...")
    return read_base64(data)


def read_base64(data: str) -> bytes:
    """Returns the file whose base64 (RFC 4648, sections 4 and 5) is `data`: in lines or not, padded or not,
    percent-encoded or not. Raises ImageUrlError for other data, for an empty file, and for one of more than
    MAX_IMAGE_BYTES."""
    for escape, character in zip(PERCENT_ENCODED.split(), PERCENT_DECODED) if "%" in data else ():
        data = data.replace(escape, character)
    try:
        lines = [line.strip() for line in data.encode("ascii").splitlines()]
        digits = b"".join(lines).translate(STANDARD).rstrip(b"=")
        file = base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except ValueError:  # also for characters that are not ASCII
        what = "has data that is not base64: it is truncated, or has a character that base64 does not have"
        raise ImageUrlError(what) from None
    if not file:
        raise ImageUrlError("has no data")
    if len(file) > MAX_IMAGE_BYTES:
        raise _too_large()
    return file


def fetch_image(url: str, domains: Container[str]) -> bytes:
    """Returns the file that an http or https URL leads to, with up to MAX_REDIRECTS redirects. The file may
    be anything, also empty. Waits up to MAX_FETCH_S for all of it, the wait for one of the FETCHES included.

    domains: what the operator allows (`--allowed-media-domains`), such as `example.com` or `10.0.0.5:8000`:
    hosts, each with its port if that is not the scheme's. The host of the URL, and of each redirect, must be
    in `domains`. Each address of such a host must be public, or be in `domains` itself.

    Raises ImageUrlError for a URL or a host that is not allowed, a host that cannot be reached, a response
    whose status is not 200, a file of more than MAX_IMAGE_BYTES, too many redirects, and after MAX_FETCH_S.
    """
    too_slow = ImageUrlError(f"takes longer than {MAX_FETCH_S:g} s to fetch")
    with gevent.Timeout(MAX_FETCH_S, too_slow), FETCHES:
        for _ in range(1 + MAX_REDIRECTS):
            place = _Place.of(url)
            if place.authority not in domains:
                raise ImageUrlError(
                    f"names the host {place.authority[:100]}, from which this server does not fetch images "
                    "(--allowed-media-domains); send the image as a `data:` URL"
                )
            with contextlib.closing(_connect(place, domains)) as sock:
                file, url = _get(place, url, sock)
            if file is not None:
                return file
    raise ImageUrlError(f"redirects more than {MAX_REDIRECTS} times")


class _Place(NamedTuple):
    """What a URL names. A host is a name, or an address without brackets."""

    scheme: str
    host: str
    port: int
    target: str  # path and query

    @classmethod
    def of(cls, url: str) -> _Place:
        """Reads a URL; its fragment is dropped, and characters that are not ASCII become percent-encoded,
        also in the host. Raises ImageUrlError for a URL that is not valid, not http or https, or has a user
        name or a password."""
        # So nothing in it ends a line, and a host that is not ASCII has percent signs, as no allowed one has.
        url = quote(url, safe=string.punctuation, errors="replace")
        try:
            parts = urlsplit(url)
            port = PORTS.get(parts.scheme) if parts.port is None else parts.port
            host = parts.hostname
        except ValueError:
            raise ImageUrlError("is not a valid URL") from None
        if parts.scheme not in PORTS or not host:
            raise ImageUrlError("must be an http, https or `data:` URL")
        if "@" in parts.netloc:
            raise ImageUrlError("must have no user name or password in it")
        query = f"?{parts.query}" if parts.query else ""
        return cls(parts.scheme, host, port, (parts.path or "/") + query)

    @property
    def authority(self) -> str:
        """The host as the operator writes it: an IPv6 address in brackets, and the port if that is not the
        scheme's."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def _connect(place: _Place, domains: Container[str]) -> socket.socket:
    """Returns a connection to the first address of the host that can be reached, which the caller has to
    close. Raises ImageUrlError if the host is not found, if one of its addresses is not allowed, if none can
    be reached, or if the certificate of one is not valid.

    The host is looked up once: another look-up might give other addresses than those that were checked.
    """
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageUrlError("names a host that is not found") from None
    addresses = list(dict.fromkeys(ipaddress.ip_address(address[0]) for *_, address in found))
    for address in addresses:
        if not (_is_public(address) or place._replace(host=str(address)).authority in domains):
            raise ImageUrlError("leads to an address that is not public")
    for address in addresses:
        with contextlib.suppress(OSError):
            return _open(place, str(address))
    raise ImageUrlError("names a host that cannot be reached")


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the internet, and embeds no other address, which might not be."""
    if address.version == 4:
        return address.is_global and not address.is_multicast
    embeds_ipv4 = address.sixtofour or address.teredo  # a mapped one is not in UNICAST
    return address.is_global and address in UNICAST and not embeds_ipv4


def _open(place: _Place, address: str) -> socket.socket:
    """Returns a connection to an address of the place, with TLS for https. Waits CONNECT_SECONDS for the
    connection; what follows, the handshake of TLS included, has no limit of its own. Raises OSError, and
    ImageUrlError for a certificate that is not valid."""
    sock = socket.create_connection((address, place.port), CONNECT_SECONDS)
    sock.settimeout(None)  # MAX_FETCH_S are for all of it
    try:
        if place.scheme == "https":
            sock = _tls().wrap_socket(sock, server_hostname=place.host, do_handshake_on_connect=False)
            sock.do_handshake()  # by itself, so that a timeout closes the socket
    except ssl.SSLCertVerificationError as error:
        sock.close()
        what = f"names a host whose certificate is not valid: {error.verify_message}"
        raise ImageUrlError(what) from None
    except BaseException:
        sock.close()
        raise
    return sock


@functools.cache
def _tls() -> ssl.SSLContext:
    """The settings of TLS, which verify certificates and the host names in them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs()
    return context


class _Stream(io.RawIOBase):
    """The input of a connected socket, as http.client reads it. Raises ImageUrlError once more than
    MAX_IMAGE_BYTES are read: body, headers and interim responses together."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._left = MAX_IMAGE_BYTES

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, PIECE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        gevent.sleep(YIELD_S)  # a fast server must not keep the event loop to itself, nor escape the timeout
        count = self._sock.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise _too_large()
        return count


def _get(place: _Place, url: str, sock: socket.socket) -> tuple[bytes | None, str]:
    """Sends the request, waits for the response without a limit of its own, and returns the file and "", or
    None and the URL that the response redirects to. place: what `url` names. sock: a connection to that
    place, which stays open.

    Raises ImageUrlError for another status than 200, compressed data, more than MAX_IMAGE_BYTES, fewer bytes
    than announced, and a connection that fails.
    """
    connection = http.client.HTTPConnection(place.host, place.port)
    connection.sock = sock  # so it opens none of its own
    headers = {
        "Host": place.authority,
        "User-Agent": "neuron-textgen",
        "Accept": "image/*",
        "Connection": "close",
    }
    try:
        connection.request("GET", place.target, headers=headers)
        response = http.client.HTTPResponse(_Stream(sock), method="GET")
        response.begin()
        if response.status in (301, 302, 303, 307, 308) and (location := response.getheader("Location")):
            return None, urljoin(url, location)
        if response.status != 200:
            raise ImageUrlError(f"is answered with status {response.status}")
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise ImageUrlError("is answered with compressed data (Content-Encoding)")
        if (response.length or 0) > MAX_IMAGE_BYTES:
            raise _too_large()
        file = bytearray()
        while piece := response.read(PIECE):
            file += piece
        if response.length:
            raise ImageUrlError("is answered with fewer bytes than announced (Content-Length)")
        return bytes(file), ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ImageUrlError(f"cannot be fetched: {type(error).__name__}") from None


def _too_large() -> ImageUrlError:
    return ImageUrlError(f"has more than the {MAX_IMAGE_BYTES} bytes that an image may have")
