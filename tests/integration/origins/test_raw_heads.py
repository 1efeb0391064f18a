"""Heads of answers that no store sends by design: floods, bytes beyond ASCII, absurd numbers; spellings of urls."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from shardcache.config import OriginTable
from shardcache.errors import OriginError
from shardcache.origin.registry import Origins
from shardcache.transport.workers import nothing
from support.network.scripted_server import Reply, ScriptedServer, answer, head
from support.stores import aws_env
from support.stores.buckets import read_range, use_aws
from support.stores.mischief import Ending

FLOOD = Reply(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 65_000) for n in range(95)), Ending.HANG)
DATA = b"0123456789"


@pytest.mark.parametrize("way", ["http", "s3", "s3 listing"])
async def test_flood_of_headers_is_a_typed_error(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """At once, with the url and a remedy; the connection is closed."""
    with ScriptedServer(FLOOD) as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        url = server.url() if way == "http" else "s3://bucket/a/"
        ask = origins.origin(url).list_prefix(url, nothing) if "list" in way else origins.origin(url).stat(url + "b")
        with pytest.raises(OriginError, match="64 KiB") as failed:
            await ask
        assert not failed.value.retryable
        assert failed.value.url is not None and failed.value.url.startswith(url)
        assert failed.value.remedy
        await asyncio.to_thread(server.wait_closed, server.connections)


ODD_ETAGS = [b'"caf\xc3\xa9"', b'"\xe9\xff\xad\xa0"', b"plain", b'W/"\xe9"']


@pytest.mark.parametrize("etag", ODD_ETAGS)
async def test_etag_is_sent_back_byte_by_byte(etag: bytes, origins: Origins) -> None:
    """In whichever encoding it is: otherwise the server answers 412 for ever."""
    shown = [f"ETag: {etag.decode('latin-1')}", f"Content-Range: bytes 0-0/{len(DATA)}"]
    with ScriptedServer(raw(answer(DATA[:1], *shown)), raw(answer(DATA, shown[0]))) as server:
        obj = await origins.origin(server.url()).stat(server.url())
        with contextlib.suppress(OriginError):  # the script knows no ranges
            await read_range(origins.origin(obj.url), obj, 0, len(DATA))
        sent = [line for line in server.heads[1].split("\r\n") if line.startswith("If-Match")]
        assert sent == ([f"If-Match: {etag.decode('latin-1')}"] if etag.startswith(b'"') else [])


def raw(data: bytes) -> bytes:
    """Return an answer whose characters are bytes."""
    return data.decode().encode("latin-1")


@pytest.mark.parametrize("by_sdk", [False, True])
async def test_s3_etag_beyond_ascii_is_one_version_however_it_is_requested(
    by_sdk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a presigned url or by the SDK; the bytes come."""
    size, etag = f"Content-Length: {len(DATA)}", 'ETag: "\xe9\xff"'
    span = f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}"
    replies = [raw(head(size, etag, status="200 OK")), raw(head(size, etag, span) + DATA)]
    with ScriptedServer(*replies) as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        options = {"config_kwargs": {"s3": {"addressing_style": "path"}}} if by_sdk else {}
        table = OriginTable.model_validate({"match": "s3://", "storage_options": options})
        origins = Origins([table], max_connections=4)
        origin = origins.origin("s3://bucket/a.tar")
        obj = await origin.stat("s3://bucket/a.tar")
        assert (obj.version, obj.joinable) == ("\xe9\xff", not by_sdk)
        assert await read_range(origin, obj, 0, len(DATA)) == DATA
        await origins.close()


LOCATIONS = {
    b"/caf\xc3\xa9.tar": "/caf\xc3\xa9.tar",
    b"/\xe9\xff?x=\xe9": "/\xe9\xff?x=\xe9",
    b"/a%2Fb%7e?sig=%2B%7E&": "/a%2Fb%7e?sig=%2B%7E&",
    b"/a b": "/a%20b",
    b"?x=1": "/a.tar?x=1",
}


@pytest.mark.parametrize("location", LOCATIONS)
async def test_redirect_is_followed_to_the_bytes_of_its_location(location: bytes, origins: Origins) -> None:
    """Its signature is of just that spelling; only blanks cannot be sent as they came."""
    redirect = raw(head(f"Location: {location.decode('latin-1')}", "Content-Length: 0", status="302 Found"))
    with ScriptedServer(redirect, answer(DATA[:1], f"Content-Range: bytes 0-0/{len(DATA)}")) as server:
        await origins.origin(server.url()).stat(server.url())
        assert server.heads[1].split(" ")[1] == LOCATIONS[location]


SPELLINGS = {
    "/a%2Fb%7E/~x.tar?X-Amz-Credential=k%2F20%7e&sig=a%2Bb%3d&x=%2f'()*": None,
    "/a.tar?sig=a+b/c==&y=$!,;:@": None,
    "//a//b/./c.tar?&&a=1&": None,
    "/caf\xe9 b.tar?100%&x=%": "/caf%C3%A9%20b.tar?100%25&x=%25",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("params", [{}, {"key": "a/b~"}])
async def test_users_url_is_sent_as_it_is_spelt(spelling: str, params: dict[str, str]) -> None:
    """Parts of it are signed; only what cannot be sent is encoded."""
    with ScriptedServer(answer(DATA[:1], f"Content-Range: bytes 0-0/{len(DATA)}")) as server:
        table = OriginTable.model_validate({"match": "http://", "storage_options": {"params": params}})
        origins = Origins([table], max_connections=1)
        await origins.origin(server.url()).stat(server.url(spelling))
        await origins.close()
        wanted = SPELLINGS[spelling] or spelling
        assert server.heads[0].split(" ")[1] == (f"{wanted}&key=a%2Fb~" if params else wanted)


# Of a listing's numbers, botocore takes care: signs and underscores are harmless there.
ABSURD = ["9" * 400, "9" * 5000, "9" * 19, "-5", "0x10", "\xb2", "", "+5", "5_0", "5, 5"]
PLACES = {
    "length": ("http", lambda number: head(f"Content-Length: {number}", 'ETag: "1"', status="200 OK")),
    "range": ("http", lambda number: answer(b"a", f"Content-Range: bytes 0-0/{number}")),
    "object": ("s3", lambda number: head(f"Content-Length: {number}", 'ETag: "1"', status="200 OK")),
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
        return Reply(raw(self.data), Ending.CLOSE)


@pytest.mark.parametrize("place", PLACES)
async def test_absurd_number_in_an_answer_is_a_typed_error(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """Neither taken for another one nor an error of Python's."""
    scheme, reply = PLACES[place]
    with AbsurdServer() as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        url = server.url() if scheme == "http" else "s3://bucket/a/"
        origin = origins.origin(url)
        for number in ABSURD[:7] if place == "listing" else ABSURD:
            server.data = reply(number)
            with pytest.raises(OriginError) as failed:
                await (origin.list_prefix(url, nothing) if place == "listing" else origin.stat(url))
            assert "refused" not in failed.value.message
        assert len(server.heads) >= len(ABSURD[:7])


async def test_error_escapes_and_cuts_what_a_server_sent(origins: Origins) -> None:
    """Whoever prints it on a terminal is shown text, and not pages of it."""
    with ScriptedServer(Reply(b"\x1b]0;you\x07\x9b2J" + b"A" * 8000 + b"\r\n\r\n", Ending.CLOSE)) as server:
        with pytest.raises(OriginError, match=r"A{100}") as failed:
            await origins.origin(server.url()).stat(server.url())
        assert failed.value.message.isprintable()
        assert r"\x1b]0;you\x07\x9b2J" in failed.value.message
        assert len(failed.value.message) <= 500
