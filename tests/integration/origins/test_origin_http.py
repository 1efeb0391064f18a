"""Web servers: ranges, ETags, refusals, header floods, absurd numbers, spellings of urls."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from shardcache import errors
from shardcache.config.origin_table import OriginTable
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import nothing
from support.cases import first_quick
from support.network.scripted_server import Reply, ScriptedServer, answer, head
from support.stores import aws_env
from support.stores.buckets import read_range, read_whole, use_aws
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Ending, Mischief

DATA = bytes(range(256)) * 400


async def stat(origins: Origins, server: FaultyS3, key: str = "a.tar") -> RemoteObject:
    """Put the data on the server and return its present version."""
    server.put(key, DATA)
    return await origins.origin(server.http_url(key)).stat(server.http_url(key))


async def parts_of(origins: Origins, obj: RemoteObject) -> list[bytes]:
    """Return the parts of 30,000 bytes."""
    return await read_whole(origins.origin(obj.url), obj, 30_000)


@pytest.mark.parametrize(
    "validators", first_quick([("ETag",), ("Last-Modified",), ("ETag", "Last-Modified")])
)
async def test_ranges_of_one_version(
    validators: tuple[str, ...], faulty: FaultyS3, origins: Origins
) -> None:
    """Ranges come exactly, and a file replaced in between is noticed, by ETag or by date."""
    faulty.validators = validators
    obj = await stat(origins, faulty)
    assert obj.size_bytes == len(DATA)
    assert obj.has_ranges is True
    assert obj.is_guarded is True
    origin = origins.origin(obj.url)
    assert await read_range(origin, obj, 1000, 70_000) == DATA[1000:70_000]
    assert await read_range(origin, await origin.stat(obj.url, 1000), 0, 1000) == DATA[:1000]
    assert len(faulty.seen) == 4, "the read was requested with the version"
    faulty.put("a.tar", DATA[::-1])
    with pytest.raises(errors.ShardChangedError):
        await read_range(origin, obj, 0, 10)


@pytest.mark.parametrize(
    ("modified", "ranges"),
    [
        ("Thu, 01 Jan 2026 00:00:08 GMT", True),
        ("Thu, 01 Jan 2026 00:00:10 GMT", False),
        pytest.param("Thu, 01 Jan 99999 00:00:08 GMT", False, marks=pytest.mark.slow),
        pytest.param("0", False, marks=pytest.mark.slow),
    ],
)
async def test_object_modified_just_now_comes_in_one_answer(
    modified: str, ranges: bool, origins: Origins
) -> None:
    """A second version within that second would have the same date."""
    dates = "Date: Thu, 01 Jan 2026 00:00:10 GMT", f"Last-Modified: {modified}"
    with ScriptedServer(answer(b"x", "Content-Range: bytes 0-0/9", *dates)) as server:
        obj = await origins.origin(server.url()).stat(server.url())
    assert obj.has_ranges == ranges
    assert obj.is_guarded == ranges
    assert obj.version == ("size=9" if modified == "0" else modified)


@pytest.mark.parametrize(
    ("ranges", "validators"), [(False, ("ETag",)), (True, ())], ids=["no ranges", "no version"]
)
async def test_object_of_unknown_length_is_refused(
    ranges: bool, validators: tuple[str, ...], faulty: FaultyS3, origins: Origins
) -> None:
    """A cut could not be told from the end, so this is an error with a remedy."""
    faulty.ranges = ranges
    faulty.validators = validators
    faulty.lengths = False
    with pytest.raises(errors.OriginError, match="does not state the file's size") as refused:
        await parts_of(origins, await stat(origins, faulty))
    assert "Content-Length" in refused.value.remedy
    assert not refused.value.retryable


@pytest.mark.parametrize("lengths", first_quick([True, False]), ids=["lengths", "chunks"])
async def test_ranges_in_chunks_and_of_encoded_files(
    lengths: bool, faulty: FaultyS3, origins: Origins
) -> None:
    """A range counts stored bytes, even in chunks or when the server encoded them."""
    faulty.lengths = lengths
    faulty.encoding = "gzip" if lengths else None
    obj = await stat(origins, faulty)
    assert await read_range(origins.origin(obj.url), obj, 1000, 70_000) == DATA[1000:70_000]


@pytest.mark.parametrize(
    ("ranges", "lengths"),
    [
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(True, False), (False, False)]),
    ],
)
async def test_bytes_that_are_encoded_on_the_way_are_refused(
    ranges: bool, lengths: bool, faulty: FaultyS3, origins: Origins
) -> None:
    """A server that compresses bytes against the request gets an error and no second try."""
    obj = await stat(origins, faulty)
    faulty.ranges = ranges
    faulty.lengths = lengths
    faulty.compresses = True
    with pytest.raises(errors.OriginError, match="encodes the file on the fly") as refused:
        await stat(origins, faulty)
    assert "compression" in refused.value.remedy
    assert not refused.value.retryable
    with pytest.raises(errors.OriginError, match="encodes the file on the fly"):
        if ranges:
            await read_range(origins.origin(obj.url), obj, 1000, 70_000)
        else:
            await parts_of(origins, obj)


async def test_refusals_are_typed(faulty: FaultyS3, origins: Origins) -> None:
    """403, 404 and 5xx are three different errors, and only the last may be tried again.

    An empty file is none of them, though a server answers 416 to any range of nothing; a listing is
    refused.
    """
    obj = await stat(origins, faulty)
    faulty.put("empty.tar", b"")
    assert (await origins.origin(obj.url).stat(faulty.http_url("empty.tar"))).size_bytes == 0
    with pytest.raises(errors.OriginError) as refused:
        await origins.origin(obj.url).list_prefix(faulty.http_url(""), nothing)
    assert "{000..099}" in refused.value.remedy
    for url, error in {
        faulty.http_url("no.tar"): errors.NotFoundError,
        "http://127.0.0.1:1/a.tar": errors.OriginUnavailableError,
        "http://": errors.ConfigError,
    }.items():
        with pytest.raises(error):
            await origins.origin(url).stat(url)
    for fault, error in {
        Mischief.FORBIDDEN: errors.AccessDeniedError,
        Mischief.SLOW_DOWN: errors.OriginBusyError,
        Mischief.INTERNAL_ERROR: errors.OriginUnavailableError,
        Mischief.RANGE_SHIFTED: errors.OriginUnavailableError,
        Mischief.RESET: errors.OriginUnavailableError,
        Mischief.ETAG_OTHER: errors.ShardChangedError,
    }.items():
        faulty.fail(fault, key="a.tar", times=1)
        with pytest.raises(error):
            await read_range(origins.origin(obj.url), obj, 0, 50_000)


# Heads of answers that no store sends by design.

FLOOD = Reply(
    b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 65_000) for n in range(95)),
    Ending.HANG,
)
TEN = b"0123456789"


@pytest.mark.parametrize("way", first_quick(["http", "s3", "s3 listing"]))
async def test_flood_of_headers_is_a_typed_error(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """At once, with the url and a remedy; the connection is closed."""
    with ScriptedServer(FLOOD) as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        url = server.url() if way == "http" else "s3://bucket/a/"
        with pytest.raises(errors.OriginError, match="64 KiB") as failed:
            if "list" in way:
                await origins.origin(url).list_prefix(url, nothing)
            else:
                await origins.origin(url).stat(url + "b")
        assert not failed.value.retryable
        assert failed.value.url is not None
        assert failed.value.url.startswith(url)
        assert failed.value.remedy
        await asyncio.to_thread(server.wait_closed, server.connections)


ODD_ETAGS = [b'"caf\xc3\xa9"', b'"\xe9\xff\xad\xa0"', b"plain", b'W/"\xe9"']


@pytest.mark.parametrize("etag", first_quick(ODD_ETAGS))
async def test_etag_is_sent_back_byte_by_byte(etag: bytes, origins: Origins) -> None:
    """In whichever encoding it is: otherwise the server answers 412 for ever."""
    shown = [f"ETag: {etag.decode('latin-1')}", f"Content-Range: bytes 0-0/{len(TEN)}"]
    with ScriptedServer(answer(TEN[:1], *shown), answer(TEN, shown[0])) as server:
        obj = await origins.origin(server.url()).stat(server.url())
        with contextlib.suppress(errors.OriginError):  # the script knows no ranges
            await read_range(origins.origin(obj.url), obj, 0, len(TEN))
        sent = [line for line in server.heads[1].split("\r\n") if line.startswith("If-Match")]
        assert sent == ([f"If-Match: {etag.decode('latin-1')}"] if etag.startswith(b'"') else [])


LOCATIONS = {
    b"/caf\xc3\xa9.tar": "/caf\xc3\xa9.tar",
    b"/\xe9\xff?x=\xe9": "/\xe9\xff?x=\xe9",
    b"/a%2Fb%7e?sig=%2B%7E&": "/a%2Fb%7e?sig=%2B%7E&",
    b"/a b": "/a%20b",
    b"?x=1": "/a.tar?x=1",
}


@pytest.mark.parametrize("location", first_quick(LOCATIONS, 2))
async def test_redirect_is_followed_to_the_bytes_of_its_location(
    location: bytes, origins: Origins
) -> None:
    """Its signature is of just that spelling; only blanks cannot be sent as they came."""
    redirect = head(
        f"Location: {location.decode('latin-1')}", "Content-Length: 0", status="302 Found"
    )
    with ScriptedServer(
        redirect, answer(TEN[:1], f"Content-Range: bytes 0-0/{len(TEN)}")
    ) as server:
        await origins.origin(server.url()).stat(server.url())
        assert server.heads[1].split(" ")[1] == LOCATIONS[location]


SPELLINGS = {
    "/a%2Fb%7E/~x.tar?X-Amz-Credential=k%2F20%7e&sig=a%2Bb%3d&x=%2f'()*": None,
    "/a.tar?sig=a+b/c==&y=$!,;:@": None,
    "//a//b/./c.tar?&&a=1&": None,
    "/~a;b/../c.tar?x": None,
    "/caf\xe9 b.tar?100%&x=%": "/caf%C3%A9%20b.tar?100%25&x=%25",
}


@pytest.mark.parametrize("spelling", first_quick(SPELLINGS))
@pytest.mark.parametrize("params", [{}, {"key": "a/b~"}])
async def test_users_url_is_sent_as_it_is_spelt(spelling: str, params: dict[str, str]) -> None:
    """Parts of it are signed; only what cannot be sent is encoded."""
    with ScriptedServer(answer(TEN[:1], f"Content-Range: bytes 0-0/{len(TEN)}")) as server:
        table = OriginTable.model_validate(
            {"match": "http://", "storage_options": {"params": params}}
        )
        origins = Origins([table], max_connections=1)
        await origins.origin(server.url()).stat(server.url(spelling))
        await origins.close()
        wanted = SPELLINGS[spelling] or spelling
        assert server.heads[0].split(" ")[1] == (f"{wanted}&key=a%2Fb~" if params else wanted)


# Of a listing's numbers, botocore takes care: signs and underscores are harmless there.
ABSURD = ["9" * 5000, "9" * 19, "-5", "0x10", "\xb2", "", "+5", "5_0", "5, 5"]
PLACES = {
    "length": (
        "http",
        lambda number: head(f"Content-Length: {number}", 'ETag: "1"', status="200 OK"),
    ),
    "range": ("http", lambda number: answer(b"a", f"Content-Range: bytes 0-0/{number}")),
    "object": (
        "s3",
        lambda number: head(f"Content-Length: {number}", 'ETag: "1"', status="200 OK"),
    ),
    "listing": ("s3", lambda number: answer(listing(number), status="200 OK")),
}


def listing(number: str) -> bytes:
    """Return a listing of one object with a size."""
    entry = f"<Contents><Key>a</Key><ETag>1</ETag><Size>{number}</Size></Contents>"
    return f"<ListBucketResult>{entry}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()


class AbsurdServer(ScriptedServer):
    """Answers each request with `data`."""

    data = b""

    def reply(self, _head: str, _number: int) -> Reply:
        """As `ScriptedServer.reply`."""
        return Reply(self.data, Ending.CLOSE)


@pytest.mark.parametrize("place", first_quick(PLACES))
async def test_absurd_number_in_an_answer_is_a_typed_error(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """Neither taken for another one nor an error of Python's."""
    scheme, reply = PLACES[place]
    with AbsurdServer() as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        url = server.url() if scheme == "http" else "s3://bucket/a/"
        origin = origins.origin(url)
        for number in ABSURD[:6] if place == "listing" else ABSURD:
            server.data = reply(number)
            with pytest.raises(errors.OriginError) as failed:
                await (origin.list_prefix(url, nothing) if place == "listing" else origin.stat(url))
            assert "refused" not in failed.value.message


@pytest.mark.slow
async def test_error_escapes_and_cuts_what_a_server_sent(origins: Origins) -> None:
    """Whoever prints it on a terminal is shown text, and not pages of it."""
    with ScriptedServer(
        Reply(b"\x1b]0;you\x07\x9b2J" + b"A" * 8000 + b"\r\n\r\n", Ending.CLOSE)
    ) as server:
        with pytest.raises(errors.OriginError, match=r"A{100}") as failed:
            await origins.origin(server.url()).stat(server.url())
        assert failed.value.message.isprintable()
        assert r"\x1b]0;you\x07\x9b2J" in failed.value.message
        assert len(failed.value.message) <= 500
