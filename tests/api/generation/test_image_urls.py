"""Images by URL: what a `data:` URL holds, and which URLs are fetched. The hosts are listeners here that count connections."""

import base64
import contextlib
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
import urllib.parse

import gevent
import pytest
from fakes.image_host import OK, Endless, ImageHost, redirect, response, slowly

from api.generation import image_urls
from api.generation.image_urls import ImageUrlError, fetch_image, read_base64, read_data_url

PNG = b"\x89PNG\r\n\x1a\n\xff\xfb"
NAME = "images.example"
WAIT_S = 60  # for what takes less than a second on an idle machine


def data_url(data=PNG, head="data:image/png;base64,"):
    return head + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,",
        "data:;base64,",
        "DATA:text/html;BASE64,",
        "data:image/jpeg;name=a.jpg;base64,",
        "data:image/jpg;charset=utf-8;base64,",
        "data:image/png; base64,",
        "data:image%2Fpng;base64, ",
    ],
)
def test_a_data_url_is_its_data_whatever_its_type_says(head):
    assert read_data_url(data_url(head=head)) == PNG


# As encoders write base64; the file needs both of the alphabet's last characters and padding.
FILE = bytes(range(256)) + b"\xfb\xff\xfe"[:2]
PLAIN = base64.b64encode(FILE).decode()
PRODUCED = {
    "lines of MIME": base64.encodebytes(FILE).decode(),
    "lines that end with CRLF": base64.encodebytes(FILE).decode().replace("\n", "\r\n"),
    "lines of 64 characters, indented": "\n".join("\t " + PLAIN[i : i + 64] for i in range(0, len(PLAIN), 64)),
    "blanks at both ends": f" \n{PLAIN}\r\n ",
    "no padding": PLAIN.rstrip("="),
    "too much padding": PLAIN + "==",
    "a line break before the padding": PLAIN.rstrip("=") + "\n=",
    "the URL-safe alphabet": base64.urlsafe_b64encode(FILE).decode(),
    "the URL-safe alphabet, as in a JSON Web Token": base64.urlsafe_b64encode(FILE).decode().rstrip("="),
    "percent-encoded": urllib.parse.quote(PLAIN, safe=""),
    "percent-encoded in lower case": urllib.parse.quote(PLAIN, safe="").replace("%2B", "%2b").replace("%2F", "%2f"),
    "percent-encoded lines": urllib.parse.quote(base64.encodebytes(FILE).replace(b"\n", b"\r\n"), safe=""),
}


@pytest.mark.parametrize("name", PRODUCED)
def test_base64_is_read_as_its_producers_write_it(name):
    assert read_base64(PRODUCED[name]) == FILE
    assert read_data_url(f"data:image/png;base64,{PRODUCED[name]}") == FILE


NOT_DATA = {
    "not base64": ("data:image/png,abc", "must be a `data:` URL in base64"),
    "no comma": ("data:image/png;base64", "must be a `data:` URL in base64"),
    "another scheme": ("https://example.com/;base64,QQ==", "must be a `data:` URL in base64"),
    "empty": ("data:image/png;base64,", "has no data"),
    "padding alone": ("data:image/png;base64,==", "has no data"),
    "blanks alone": ("data:image/png;base64, %20\n", "has no data"),
    "a sentence": ("data:image/png;base64,this is not an image!", "is not base64: it is truncated, or has a character"),
    "a path": ("data:image/png;base64,C:\\cat.png", "is not base64"),
    "a placeholder": ("data:image/png;base64,{image}", "is not base64"),
    "a URL in the data": ("data:image/png;base64,data:image/png;base64,QUJD", "is not base64"),
    "a character that is left over": ("data:image/png;base64,QUJDR", "is not base64"),
    "another escape": ("data:image/png;base64,%51UJD", "is not base64"),
    "blanks where a form's decoder found plus signs": ("data:image/png;base64,QU D", "is not base64"),
    "padding inside": ("data:image/png;base64,QQ==QQ==", "is not base64"),
    "not ASCII": ("data:image/png;base64,QQÖ=", "is not base64"),
    "zero bytes": ("data:image/png;base64,QU\0JD", "is not base64"),
}


@pytest.mark.parametrize("name", NOT_DATA)
def test_what_is_no_data_url_in_base64_is_refused_with_a_sentence(name):
    url, words = NOT_DATA[name]
    with pytest.raises(ImageUrlError, match=words):
        read_data_url(url)


def test_data_of_too_many_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_IMAGE_BYTES", 9)
    for most in (b"x" * 9, b"x" * 8):
        assert read_base64(base64.b64encode(most).decode()) == most
    for many in (b"x" * 10, b"x" * 12, b"x" * 1000):
        with pytest.raises(ImageUrlError, match="has more than the 9 bytes"):
            read_base64(base64.b64encode(many).decode())


@pytest.fixture
def host():
    with ImageHost() as host:
        host.answers["/a.png"] = response(PNG)
        yield host


@pytest.fixture
def names(monkeypatch):
    """What names resolve to, each a list of addresses; `names.asked` are their look-ups. Addresses are themselves."""
    return Names(monkeypatch)


class Names(dict):
    def __init__(self, monkeypatch):
        self.asked = []
        self._resolve = image_urls.socket.getaddrinfo
        monkeypatch.setattr(image_urls.socket, "getaddrinfo", self.resolve)

    def resolve(self, name, *arguments, **options):
        if name not in self:
            return self._resolve(name, *arguments, **options)
        self.asked.append(name)
        found = self[name]() if callable(self[name]) else self[name]
        return [entry for address in found for entry in self._resolve(address, *arguments, **options)]


def refused(url, *domains):
    with pytest.raises(ImageUrlError) as caught:
        fetch_image(url, domains)
    return str(caught.value)


def test_an_image_is_fetched_by_address_and_by_name(host, names):
    names[NAME] = ["127.0.0.1"]
    by_address = f"127.0.0.1:{host.port}"
    by_name = f"{NAME}:{host.port}"
    assert fetch_image(f"http://{by_address}/a.png", [by_address]) == PNG
    assert fetch_image(f"HTTP://{by_name.upper()}/a.png", [by_name, by_address]) == PNG
    assert names.asked == [NAME]
    head = host.requests[1].decode().split("\r\n")
    assert head[0] == "GET /a.png HTTP/1.1" and f"Host: {by_name}" in head and "Accept-Encoding: identity" in head


def test_the_port_of_the_scheme_is_not_named(host, monkeypatch):
    monkeypatch.setitem(image_urls.PORTS, "http", host.port)
    for port in ("", f":{host.port}"):
        assert fetch_image(f"http://127.0.0.1{port}/a.png", ["127.0.0.1"]) == PNG
        assert b"\r\nHost: 127.0.0.1\r\n" in host.requests[-1]


def test_a_url_with_other_characters_is_percent_encoded_and_cannot_add_headers(host):
    by_address = f"127.0.0.1:{host.port}"
    host.answers["/%C3%84%20b%2F.png?q=%0D%0AX-Evil:%201"] = response(PNG)
    assert fetch_image(f"http://{by_address}/Ä b%2F.png?q=\r\nX-Evil: 1#fragment", [by_address]) == PNG
    assert b"\r\nX-Evil" not in host.requests[0]


# {port} is the listener's; NAME resolves to 127.0.0.1, which is not named where a domain is given by its name alone.
NOT_ALLOWED = "names the host .*, from which this server does not fetch images"
NOT_PUBLIC = "leads to an address that is not public"
NOT_HTTP = "must be an http, https or `data:` URL"
NOT_VALID = "is not a valid URL"
FORBIDDEN = {
    "no domains": ("http://127.0.0.1:{port}/", "", NOT_ALLOWED),
    "another port": ("http://127.0.0.1:{port}/", "127.0.0.1", NOT_ALLOWED),
    "https at the port of http": ("https://127.0.0.1/", "127.0.0.1:80", NOT_ALLOWED),
    "subdomain": (f"http://a.{NAME}:{{port}}/", f"{NAME}:{{port}}", NOT_ALLOWED),
    "longer name": (f"http://{NAME}.evil.example:{{port}}/", f"{NAME}:{{port}}", NOT_ALLOWED),
    "trailing dot": (f"http://{NAME}.:{{port}}/", f"{NAME}:{{port}}", NOT_ALLOWED),
    "user": (f"http://{NAME}@127.0.0.1:{{port}}/", "127.0.0.1:{port}", "must have no user name"),
    "empty user": ("http://@127.0.0.1:{port}/", "127.0.0.1:{port}", "must have no user name"),
    "name as a user": (f"http://{NAME}:80@127.0.0.1:{{port}}/", NAME, "must have no user name"),
    "backslash": (f"http://127.0.0.1:{{port}}\\@{NAME}/", NAME, "must have no user name"),
    "backslash host": (f"http://127.0.0.1:{{port}}\\.{NAME}/", NAME, NOT_VALID),
    "file": ("file:///etc/passwd", "", NOT_HTTP),
    "file of a host": ("file://127.0.0.1/etc/passwd", "127.0.0.1", NOT_HTTP),
    "ftp": ("ftp://127.0.0.1:{port}/", "127.0.0.1:{port}", NOT_HTTP),
    "gopher": ("gopher://127.0.0.1:{port}/_GET", "127.0.0.1:{port}", NOT_HTTP),
    "no scheme": ("//127.0.0.1:{port}/", "127.0.0.1:{port}", NOT_HTTP),
    "a path": ("/etc/passwd", "", NOT_HTTP),
    "no host": ("http:///a.png", "", NOT_HTTP),
    "spaces first": (" http://127.0.0.1:{port}/", "127.0.0.1:{port}", NOT_HTTP),
    "newline in the scheme": ("ht\ntp://127.0.0.1:{port}/", "127.0.0.1:{port}", NOT_HTTP),
    "newline in the host": ("http://127.0.0.1\n:{port}/", "127.0.0.1:{port}", NOT_ALLOWED),
    "port 99999": ("http://127.0.0.1:99999/", "127.0.0.1", NOT_VALID),
    "port 0": ("http://127.0.0.1:0/", "127.0.0.1", NOT_ALLOWED),
    "port -1": ("http://127.0.0.1:-1/", "127.0.0.1", NOT_VALID),
    "bracket": ("http://[127.0.0.1:{port}/", "127.0.0.1:{port}", NOT_VALID),
    "localhost": ("http://localhost:{port}/", "localhost:{port}", NOT_PUBLIC),
    "127.1": ("http://127.1:{port}/", "127.1:{port}", NOT_PUBLIC),
    "127.1, address elsewhere": ("http://127.1:{port}/", "127.0.0.1:{port}", NOT_ALLOWED),
    "decimal": ("http://2130706433:{port}/", "2130706433:{port}", NOT_PUBLIC),
    "hexadecimal": ("http://0x7f000001:{port}/", "0x7f000001:{port}", NOT_PUBLIC),
    "octal": ("http://0177.0.0.01:{port}/", "0177.0.0.01:{port}", NOT_PUBLIC),
    "zero": ("http://0:{port}/", "0:{port}", NOT_PUBLIC),
    "IPv6 of IPv4": ("http://[::ffff:127.0.0.1]:{port}/", "127.0.0.1:{port}", NOT_ALLOWED),
    "full-width digits": ("http://\uff11\uff12\uff17.0.0.1:{port}/", "127.0.0.1:{port}", NOT_ALLOWED),
    "ideographic stops": ("http://127。0。0。1:{port}/", "127.0.0.1:{port}", NOT_ALLOWED),
    "circled letter": (f"http://ⓘ{NAME[1:]}:{{port}}/", f"{NAME}:{{port}}", NOT_ALLOWED),
    "Cyrillic letter": ("http://im\u0430ges.example:{port}/", f"{NAME}:{{port}}", NOT_ALLOWED),
    "slash that looks like one": (f"http://{NAME}:{{port}}\uff0f.evil.example/", f"{NAME}:{{port}}", NOT_VALID),
    "percent-encoded host": ("http://%31%32%37.0.0.1:{port}/", "127.0.0.1:{port}", NOT_ALLOWED),
    "zero byte": (f"http://127.0.0.1:{{port}}\0.{NAME}/", f"127.0.0.1:{{port}},{NAME}", NOT_VALID),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_url_that_leads_elsewhere_is_refused_and_nothing_is_connected_to(name, host, names):
    names[NAME] = ["127.0.0.1"]
    url, domains, words = (text.replace("{port}", str(host.port)) for text in FORBIDDEN[name])
    with pytest.raises(ImageUrlError, match=words):
        fetch_image(url, domains.split(","))
    assert host.connections == 0


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.0.0.5",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",  # the metadata of cloud machines
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "fe80::1%lo",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_named_host_must_have_public_addresses_only(address, host, names):
    for others in ([], ["93.184.216.34"]):
        names[NAME] = [*others, address]
        assert refused(f"http://{NAME}:{host.port}/a.png", f"{NAME}:{host.port}") == NOT_PUBLIC
    assert host.connections == 0


def test_a_private_address_is_connected_to_if_it_is_named_and_no_other_one(host, names):
    domains = [f"{NAME}:{host.port}", f"127.0.0.1:{host.port}"]
    names[NAME] = ["127.0.0.1"]
    assert fetch_image(f"http://{NAME}:{host.port}/a.png", domains) == PNG
    names[NAME] = ["127.0.0.1", "127.0.0.2"]
    assert refused(f"http://{NAME}:{host.port}/a.png", *domains) == NOT_PUBLIC
    assert refused(f"http://{NAME}:{host.port}/a.png", domains[0], "127.0.0.1") == NOT_PUBLIC  # it is named with its port
    assert host.connections == 1


def test_the_next_address_is_tried_where_one_does_not_answer(host, names):
    names[NAME] = ["127.0.0.9", "127.0.0.1"]
    domains = [f"{each}:{host.port}" for each in (NAME, "127.0.0.1", "127.0.0.9")]
    assert fetch_image(f"http://{NAME}:{host.port}/a.png", domains) == PNG
    names[NAME] = ["127.0.0.9"]
    assert refused(f"http://{NAME}:{host.port}/a.png", *domains) == "names a host that cannot be reached"
    names[NAME] = lambda: socket.getaddrinfo("no-such-name.invalid", 80)
    assert refused(f"http://{NAME}:{host.port}/a.png", *domains) == "names a host that is not found"


def test_a_name_that_changes_its_address_leads_nowhere_else(host, names):
    """DNS rebinding: what was checked is what is connected to, and each redirect is checked anew."""
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1"], ["127.0.0.2"]])
    names[NAME] = lambda: next(answers)
    domains = [f"{NAME}:{host.port}", f"127.0.0.1:{host.port}"]
    with ImageHost("127.0.0.2") as private:
        assert fetch_image(f"http://{NAME}:{host.port}/a.png", domains) == PNG
        assert next(answers) == ["127.0.0.2"]  # one look-up a URL
        host.answers["/to"] = redirect("/a.png")
        assert refused(f"http://{NAME}:{host.port}/to", *domains) == NOT_PUBLIC
        assert private.connections == 0
    assert [head.split(b" ")[1] for head in host.requests] == [b"/a.png", b"/to"]


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_three_redirects_are_followed(status, host):
    at = f"127.0.0.1:{host.port}"
    host.answers |= {"/0": redirect("/1", status), "/1": redirect("2", status), "/2": redirect(f"http://{at}/3", status)}
    host.answers["/3"] = response(PNG)
    assert fetch_image(f"http://{at}/0", [at]) == PNG
    host.answers["/3"] = redirect(f"//{at}/a.png", status)
    assert refused(f"http://{at}/0", at) == "redirects more than 3 times"


REDIRECTS = {
    "metadata": ("http://169.254.169.254/latest", NOT_ALLOWED),
    "another host": ("http://127.0.0.2:{port}/", NOT_ALLOWED),
    "another port": ("http://127.0.0.1/", NOT_ALLOWED),
    "without a scheme": ("//127.0.0.2:{port}/", NOT_ALLOWED),
    "file": ("file:///etc/passwd", NOT_HTTP),
    "data": ("data:image/png;base64,QQ==", NOT_HTTP),
    "user": ("http://user@127.0.0.1:{port}/", "must have no user name"),
    "https here": ("https://127.0.0.2:{port}/", NOT_ALLOWED),
    "no URL": ("http://[", "cannot be fetched"),
}


@pytest.mark.parametrize("name", REDIRECTS)
def test_a_redirect_is_checked_like_the_url(name, host):
    location, words = REDIRECTS[name]
    host.answers["/to"] = redirect(location.replace("{port}", str(host.port)))
    with pytest.raises(ImageUrlError, match=words):
        fetch_image(f"http://127.0.0.1:{host.port}/to", [f"127.0.0.1:{host.port}"])
    assert host.connections == 1


def test_a_redirect_between_names_is_looked_up_anew(host, names):
    names |= {NAME: ["127.0.0.1"], "cdn.example": ["127.0.0.2"]}
    host.answers["/to"] = redirect(f"http://cdn.example:{host.port}/")
    domains = [f"{each}:{host.port}" for each in (NAME, "127.0.0.1", "cdn.example")]
    assert refused(f"http://{NAME}:{host.port}/to", *domains) == NOT_PUBLIC
    assert names.asked == [NAME, "cdn.example"]


MANY = 1_000_000
TOO_LARGE = f"has more than the {MANY} bytes"
BROKEN = {
    "announced": (OK + b"Content-Length: 99999999999999\r\n\r\nx", TOO_LARGE),
    "until it closes": (Endless(OK + b"\r\n", b"x"), TOO_LARGE),
    "more than announced": (Endless(OK + b"Content-Length: 1000001\r\n\r\n", b"x"), TOO_LARGE),
    "chunks without end": (Endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"4\r\nabcd\r\n"), TOO_LARGE),
    "a chunk without end": (Endless(OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffff\r\n", b"x"), TOO_LARGE),
    "trailers without end": (Endless(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"), TOO_LARGE),
    "interim responses without end": (Endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), TOO_LARGE),
    "a header without end": (Endless(OK + b"a: ", b"x"), "cannot be fetched: LineTooLong"),
    "headers without end": (Endless(OK, b"a: b\r\n"), "cannot be fetched: HTTPException"),
    "a status without end": (Endless(b"", b"x"), "cannot be fetched: LineTooLong"),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be fetched: BadStatusLine"),
    "nothing": (b"", "cannot be fetched: RemoteDisconnected"),
    "a negative chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n", "cannot be fetched"),
    "chunks that end early": (OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nabc", "cannot be fetched: IncompleteRead"),
    "fewer bytes than announced": (OK + b"Content-Length: 9\r\n\r\nabc", "fewer bytes than announced"),
    "gzip": (response(gzip.compress(bytes(10**6)), "Content-Encoding: gzip"), "compressed data"),
    "gzip in capitals": (response(gzip.compress(bytes(10**6)), "content-encoding: GZIP, identity"), "compressed data"),
    "not found": (response(PNG, status="404 Not Found"), "is answered with status 404"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", "is answered with status 204"),
    "another protocol": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "is answered with status 101"),
    "a redirect to nowhere": (response(status="302 Found"), "is answered with status 302"),
    "error": (response(PNG, status="500 Error"), "is answered with status 500"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_without_bounds_or_sense_is_refused_and_takes_little_memory(name, host, monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_IMAGE_BYTES", MANY)
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 100)  # the bytes end it, on a slow machine too
    host.answers["/"], words = BROKEN[name]
    tracemalloc.start()
    try:
        with pytest.raises(ImageUrlError, match=words):
            fetch_image(f"http://127.0.0.1:{host.port}/", [f"127.0.0.1:{host.port}"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MANY


def test_an_image_of_the_largest_size_is_fetched_however_it_is_sent(host, monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_IMAGE_BYTES", MANY)
    file = bytes(MANY - 100)  # and the headers
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (file[:3], file[3:500_000]))
    rest = file[500_000 : len(file) - 500]
    host.answers |= {
        "/length": response(file),
        "/close": OK + b"\r\n" + file,
        "/chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest),
        "/after": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 3\r\n\r\nabcdef",
    }
    at = f"127.0.0.1:{host.port}"
    for path, expected in (("length", file), ("close", file), ("chunks", file[: len(file) - 500]), ("after", b"abc")):
        assert fetch_image(f"http://{at}/{path}", [at]) == expected


@pytest.fixture
def over():
    """Set when the test is over, for those who wait."""
    over = threading.Event()
    yield over
    over.set()


SLOW = {
    "nothing": (b"", b""),
    "a status": (b"HTTP/1.1 ", b"2"),
    "interim responses": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers": (OK, b"a: b\r\n"),
    "a body": (OK + b"\r\n", b"x"),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_answer_ends_in_time(name, host, over, monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 0.3)
    host.answers["/"] = slowly(*SLOW[name], over)
    at = f"127.0.0.1:{host.port}"
    with gevent.Timeout(WAIT_S):  # the answer itself takes until the end of the test
        assert refused(f"http://{at}/", at) == "takes longer than 0.3 s to fetch"


def test_the_time_is_for_all_redirects_and_the_look_up_too(host, names, over, monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 0.5)
    at = f"127.0.0.1:{host.port}"

    def late(answer):
        over.wait(0.2)
        yield answer

    host.answers |= {f"/{number}": late(redirect(f"/{number + 1}")) for number in range(4)}
    assert refused(f"http://{at}/0", at) == "takes longer than 0.5 s to fetch"
    names[NAME] = lambda: gevent.sleep(20)
    assert refused(f"http://{NAME}:{host.port}/", f"{NAME}:{host.port}") == "takes longer than 0.5 s to fetch"


@pytest.mark.parametrize("name", ["interim responses without end", "chunks without end", "until it closes"])
def test_a_fast_answer_without_end_neither_stops_other_greenlets_nor_escapes_the_timeout(name, host, monkeypatch):
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 100)
    monkeypatch.setattr(image_urls, "MAX_IMAGE_BYTES", 10**12)
    host.answers["/"], _ = BROKEN[name]
    at = f"127.0.0.1:{host.port}"
    fetch = gevent.spawn(fetch_image, f"http://{at}/", [at])
    while not host.requests:
        gevent.sleep(0.001)
    for _turn in range(30):  # of another greenlet, while the answer arrives
        gevent.sleep(0.001)
    assert not fetch.ready()
    fetch.kill()
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 0.5)
    assert refused(f"http://{at}/", at) == "takes longer than 0.5 s to fetch"


def test_eight_are_fetched_at_a_time(host, over, monkeypatch):
    at = f"127.0.0.1:{host.port}"
    all_wait = threading.Semaphore(0)

    class Waiting:
        def __iter__(self):
            all_wait.release()
            over.wait(20)
            yield response(PNG)

    host.answers["/"] = Waiting()
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 100)
    fetches = [gevent.spawn(fetch_image, f"http://{at}/", [at]) for _ in range(20)]
    for _ in range(8):
        while not all_wait.acquire(blocking=False):
            gevent.sleep(0.01)
    assert host.most == 8  # later a connection of the host may end after its client has begun another
    over.set()
    assert [fetch.get() for fetch in fetches] == [PNG] * 20
    assert host.connections == 20


def test_no_proxy_is_used(host, monkeypatch):
    with ImageHost() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        at = f"127.0.0.1:{host.port}"
        assert fetch_image(f"http://{at}/a.png", [at]) == PNG
        assert proxy.connections == 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with a certificate authority of its own, which issues certificates."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    return Authority(tmp_path_factory.mktemp("tls"))


NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


class Authority:
    def __init__(self, folder):
        self.folder = folder
        self._openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ours -days 9 -keyout ca.key -out ca.pem"
        )

    def context(self, name, days=9, signed_by="ca"):
        """A server's context with a certificate for a name such as DNS:a.example or IP:127.0.0.1."""
        (self.folder / "names").write_text(f"subjectAltName={name}")
        self._openssl(f"req {NEW_KEY} -subj /CN=x -keyout own.key -out own.csr")
        sign = f"-CA {signed_by}.pem -CAkey {signed_by}.key" if signed_by else "-signkey own.key"
        self._openssl(f"x509 -req -in own.csr {sign} -days {days} -extfile names -out own.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "own.pem", self.folder / "own.key")
        return context

    def _openssl(self, arguments):
        subprocess.run(["openssl", *arguments.split()], cwd=self.folder, check=True, capture_output=True)


@pytest.fixture
def secure(authority, names, monkeypatch):
    """Makes hosts that speak TLS, which are trusted as the system's are; NAME leads to them."""
    names[NAME] = ["127.0.0.1"]
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.folder / "ca.pem"))
    image_urls._tls.cache_clear()
    with contextlib.ExitStack() as hosts:

        def make(name, **options):
            host = hosts.enter_context(ImageHost(tls=authority.context(name, **options)))
            host.answers["/a.png"] = response(PNG)
            return host

        yield make
    image_urls._tls.cache_clear()


def test_an_image_is_fetched_over_tls(secure):
    host = secure(f"DNS:{NAME},IP:127.0.0.1")
    domains = [f"{NAME}:{host.port}", f"127.0.0.1:{host.port}"]
    for name in (NAME, "127.0.0.1"):
        assert fetch_image(f"https://{name}:{host.port}/a.png", domains) == PNG
    host.answers["/close"] = OK + b"\r\n" + PNG
    assert fetch_image(f"https://{NAME}:{host.port}/close", domains) == PNG


CERTIFICATES = {
    "another name": ({"name": "DNS:other.example"}, "Hostname mismatch"),
    "an address alone": ({"name": "IP:127.0.0.1"}, "Hostname mismatch"),
    "unknown": ({"name": f"DNS:{NAME}", "signed_by": None}, "self-signed certificate"),
    "expired": ({"name": f"DNS:{NAME}", "days": -1}, "certificate has expired"),
}


@pytest.mark.parametrize("kind", CERTIFICATES)
def test_a_host_with_a_certificate_that_is_not_valid_gets_no_request(kind, secure):
    options, words = CERTIFICATES[kind]
    host = secure(**options)
    problem = refused(f"https://{NAME}:{host.port}/a.png", f"{NAME}:{host.port}", f"127.0.0.1:{host.port}")
    assert problem.startswith("names a host whose certificate is not valid: ") and words in problem
    assert host.requests == []


def test_http_at_the_port_of_https_is_refused_and_a_silent_handshake_ends_in_time(host, names, over, monkeypatch):
    at = f"127.0.0.1:{host.port}"
    monkeypatch.setattr(image_urls, "MAX_FETCH_S", 0.5)
    assert refused(f"https://{at}/a.png", at) == "takes longer than 0.5 s to fetch"  # the listener waits for a head
