"""One transport request to a real server: the bodies written, the connections reused."""

import errno
import gc
import http.client
import io
import random
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.between.parts import RECORD, PartFileError, Parts
from shardcache.transport.http.exchange import Exchange
from shardcache.transport.http.gate import CancelledError, Gate
from shardcache.transport.http.http_heads import HeadError
from shardcache.transport.http.opening import Server
from shardcache.transport.http.pool import Pool
from support.network.certificates import Authority
from support.network.scripted_server import Reply, ScriptedServer, answer, chunked, head
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.stores.mischief import Ending

DATA = random.Random(3).randbytes(100_000)
BLANK = bytes(len(DATA))
MIB = 1024**2
LARGE = random.Random(4).randbytes(2 * MIB + 5000)
ENDLESS = float("inf")


class Rig:
    """A file to be filled, and a pool of connections.

    Attributes:
        gate: of the request that began last.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.part"
        self.journal = folder / "a.journal"
        self.path.write_bytes(BLANK)
        self.pool = Pool()
        self.gate = Gate(ENDLESS)
        self.ca_file: str | None = None
        self._threads = ThreadPoolExecutor()

    @property
    def records(self) -> list[tuple[int, ...]]:
        """Contents of the journal."""
        return list(RECORD.iter_unpack(self.journal.read_bytes()))

    @property
    def written(self) -> bytes:
        """Contents of the file."""
        return self.path.read_bytes()

    def begin(
        self,
        server: ScriptedServer,
        *,
        expected: Mapping[str, Sequence[str | None]] | None = None,
        limit_bytes: float = ENDLESS,
        held: bool = False,
        encoded_chunks: bool = True,
        part_bytes: int = 0,
        data: bytes = DATA,
    ) -> Future[Answer]:
        """Ask for all of the file in a thread of its own."""
        self.gate = Gate(limit_bytes)
        parts = Parts(str(self.path), str(self.journal), part_bytes or len(data), 0, len(data))
        body = Body(parts, 206, expected or {}, held=held, encoded_chunks=encoded_chunks)
        request = Request("GET", server.url(), {}, ca_file=self.ca_file)
        asked = Exchange(request, body, self.gate, lambda: None, lambda: None)
        return self._threads.submit(asked.run, self.pool)

    def fetch(self, server: ScriptedServer) -> Answer:
        """Return the answer."""
        return self.begin(server).result()

    def close(self) -> None:
        """End every thread."""
        self.gate.cancel()
        self._threads.shutdown()
        self.pool.distrust(ENDLESS)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig whose threads end with the test."""
    made = Rig(tmp_path)
    yield made
    made.close()


def test_the_body_that_was_asked_for_is_written_and_its_connection_used_again(rig: Rig) -> None:
    """True with a length, false in chunks."""
    with ScriptedServer(answer(DATA), chunked(DATA), answer(DATA)) as server:
        for _ in range(3):
            rig.path.write_bytes(BLANK)
            assert [sums.index for sums in rig.fetch(server).sums or []] == [0]
            assert rig.written == DATA
        assert server.connections == 1
        assert len(server.heads) == 3


OTHER_BODIES = {
    "another status": answer(DATA, status="200 OK"),
    "an error": answer(b"<Error/>", status="503 Slow Down"),
    "a redirect": answer(b"", "Location: /b.tar", status="302 Found"),
    "shorter": answer(DATA[:-1]),
    "longer": answer(DATA + b"x"),
    "empty": answer(b""),
    "of two lengths": head(f"Content-Length: {len(DATA)}", "Content-Length: 10") + DATA,
    "of two lengths, the wrong one first": head(
        "Content-Length: 10", f"Content-Length: {len(DATA)}"
    )
    + DATA,
    "of a negative length": head("Content-Length: -5") + DATA,
    "of a length that is no number": head("Content-Length: many") + DATA,
    "longer, in chunks": chunked(DATA + b"x"),
    "as long as the connection": Reply(head() + DATA, Ending.CLOSE),
}


@pytest.mark.parametrize("other", OTHER_BODIES)
def test_another_body_is_not_written_nor_taken_for_the_next_answer(other: str, rig: Rig) -> None:
    """The next try gets the right answer. No redirect is followed."""
    with ScriptedServer(OTHER_BODIES[other], answer(DATA)) as server:
        assert rig.fetch(server).sums is None
        assert rig.written == BLANK
        assert rig.fetch(server).sums
        assert rig.written == DATA
        assert [line.split()[1] for line in server.heads] == ["/a.tar", "/a.tar"]


@pytest.mark.parametrize(
    ("etags", "is_written"),
    [(['"1"'], True), (['"2"'], False), (['"1"', '"2"'], False), ([], False)],
)
def test_a_body_of_another_version_is_not_written(
    etags: list[str], is_written: bool, rig: Rig
) -> None:
    """A body of two versions, or of none unless None permits it, is not written."""
    with ScriptedServer(answer(DATA, *(f"ETag: {etag}" for etag in etags))) as server:
        found = rig.begin(server, expected={"etag": ['"1"']}).result()
        assert found.status == 206
        assert bool(found.sums) == is_written
        assert (rig.written == DATA) == is_written
        if not is_written:
            assert found.headers.get("etag", "") == ", ".join(etags)
        assert bool(rig.begin(server, expected={"etag": ['"1"', None]}).result().sums) == (
            is_written or not etags
        )


@pytest.mark.parametrize(("encoded_chunks", "written"), [(True, DATA), (False, BLANK)])
def test_chunks_that_are_encoded_are_written_where_they_are_stored_so(
    encoded_chunks: bool, written: bytes, rig: Rig
) -> None:
    """A web server may encode chunks; with a length, the stored bytes come."""
    with ScriptedServer(
        chunked(DATA, "Content-Encoding: gzip"), answer(DATA, "Content-Encoding: gzip")
    ) as server:
        rig.begin(server, encoded_chunks=encoded_chunks).result()
        assert rig.written == written
        rig.begin(server, encoded_chunks=encoded_chunks).result()
        assert rig.written == DATA


@pytest.mark.parametrize("early", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_an_interim_answer_is_not_the_answer(early: str, rig: Rig) -> None:
    """Bytes that follow the body belong to this request and to no other one."""
    interim = head("Link: </style.css>", status=early)
    with ScriptedServer(interim * 2 + answer(DATA), answer(b"", status="404 Not Found")) as server:
        assert rig.fetch(server).sums
        assert rig.written == DATA
        assert rig.fetch(server).status == 404
        assert server.connections == 1


OK = b"HTTP/1.1 200 OK\r\n"
LARGE_HEADERS = b"".join(b"x-%d: %b\r\n" % (number, b"a" * 65_000) for number in range(95))
CHUNKED = "Transfer-Encoding: chunked"
# By a size of -1, http.client would read for as long as the server sends.
ODD_SIZES = ["-1", "+186a0", "0x186a0", "186_a0", "f" * 400, "", " 186a0", "many"]
BROKEN = {
    "garbage": Reply(b"\x00\xff not a word of HTTP \r\n\r\n" * 10, Ending.CLOSE),
    "half a head": Reply(
        head("Content-Length: 0", "ETag: 1", status="404 Not Found")[:-4], Ending.CLOSE
    ),
    "nothing": Reply(b"", Ending.CLOSE),
    "a reset": Reply(b"", Ending.RESET),
    "half a body": Reply(answer(DATA)[:50_000], Ending.CLOSE),
    "half a body and a reset": Reply(answer(DATA)[:50_000], Ending.RESET),
    "half of the chunks": Reply(chunked(DATA)[:50_000], Ending.CLOSE),
    "half of the chunks and a reset": Reply(chunked(DATA)[:50_000], Ending.RESET),
    "chunks that end in order, but too early": Reply(chunked(DATA[:-1]), Ending.HANG),
    **{
        f"a chunk of the size {size[:9]!r}": Reply(head(CHUNKED) + f"{size}\r\n".encode() + DATA)
        for size in ODD_SIZES
    },
    "flood of small headers": Reply(OK + b"x-more: and more\r\n" * 20_000, Ending.HANG),
    "flood of large headers": Reply(OK + LARGE_HEADERS, Ending.HANG),
    "flood of one line": Reply(OK + b"x: " + b"a" * 10_000_000, Ending.HANG),
    "flood of interim answers": Reply(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, Ending.HANG),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_answer_is_an_error(broken: str, rig: Rig) -> None:
    """The request is not repeated over a new connection, and the next one is sent over another.

    No part counts as written. A head has an error of its own after 64 KiB.
    """
    with ScriptedServer(BROKEN[broken], answer(DATA)) as server:
        with pytest.raises((OSError, http.client.HTTPException)) as failed:
            rig.fetch(server)
        assert isinstance(failed.value, HeadError) == broken.startswith("flood")
        server.wait_closed(1)
        assert len(server.heads) == 1
        assert not rig.journal.exists()
        assert rig.fetch(server).sums
        assert rig.written == DATA
        assert server.connections == 2


@pytest.fixture(params=["http", "https"])
def context(request: pytest.FixtureRequest, rig: Rig, tmp_path: Path) -> ssl.SSLContext | None:
    """A server's TLS, which the rig trusts, or none."""
    authority = Authority(tmp_path / "authority")
    rig.ca_file = str(authority.ca_file)
    return authority.server() if request.param == "https" else None


def test_a_connection_on_which_more_comes_than_was_said_is_not_used_again(
    context: ssl.SSLContext | None, rig: Rig
) -> None:
    """Bytes after the body might be taken for the next answer, over TLS as well."""
    too_much = answer(DATA + answer(BLANK), length=len(DATA))
    with ScriptedServer(too_much, answer(DATA), context=context) as server:
        assert rig.fetch(server).sums
        assert rig.written == DATA
        assert rig.fetch(server).sums
        assert rig.written == DATA
        assert server.connections == 2


def test_unrequested_answer_is_ignored(context: ssl.SSLContext | None, rig: Rig) -> None:
    """An answer of another request comes with the end of one, as a bad proxy might send it."""
    first = answer(b"", status="404 Not Found")
    extra = answer(b"", status="500 Odd")
    # The buffered bytes go with the first answer.
    mixed_up = first + b"x" * (io.DEFAULT_BUFFER_SIZE - len(first)) + extra
    with ScriptedServer(answer(DATA), mixed_up, answer(DATA), context=context) as server:
        assert rig.fetch(server).sums
        assert rig.fetch(server).status == 404
        assert rig.fetch(server).sums


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (answer(DATA, "Connection: close"), 206),
        (Reply(answer(b"a", length=9, status="500 Odd"), Ending.HANG), 500),
    ],
    ids=["the server wants it closed", "an error does not come whole"],
)
def test_a_connection_of_no_more_use_is_closed(reply: Reply | bytes, status: int, rig: Rig) -> None:
    """A connection is closed even if the server leaves it open after an error."""
    with ScriptedServer(reply, answer(DATA)) as server:
        found = rig.fetch(server)
        assert found.status == status
        assert bool(found.sums) == (status == 206)
        server.wait_closed(1)
        assert rig.fetch(server).sums


@pytest.mark.parametrize("ending", [Ending.CLOSE, Ending.RESET])
def test_an_idle_connection_that_was_closed_costs_nothing(ending: Ending, rig: Rig) -> None:
    """A request on a connection closed by then is sent again over a new connection."""
    patience_s = rig.pool.patience_s
    with ScriptedServer(
        Reply(answer(DATA), Ending.CLOSE), answer(DATA), Reply(b"", ending), answer(DATA)
    ) as server:
        for _ in range(3):
            assert rig.fetch(server).sums
        assert len(server.heads) == 4
        assert server.connections == 3
        assert rig.pool.patience_s == patience_s  # nothing is held against other connections


def test_a_closed_connection_is_not_called_silent_later(rig: Rig) -> None:
    """A request sent again over a new connection is cancelled before its answer."""
    sent_again = threading.Event()
    silent = Reply(b"", Ending.HANG, then=lambda _: sent_again.set())
    with ScriptedServer(answer(DATA), Reply(b"", Ending.RESET), silent) as server:
        assert rig.fetch(server).sums
        asked = rig.begin(server)
        sent_again.wait()
        assert rig.gate.unanswered_since_s is None
        rig.gate.cancel()
        with pytest.raises(CancelledError):
            asked.result()


def test_an_idle_connection_that_keeps_silent_is_given_up(rig: Rig) -> None:
    """The question is asked over a new one, and all others that were idle as long are closed."""
    asked_s: list[float] = []
    rig.pool = Pool(asked_s.append, silence_s=0.1)
    silent = ScriptedServer(answer(DATA), Reply(b"", Ending.HANG), answer(DATA))
    with ScriptedServer(answer(DATA)) as other, silent as one:
        assert rig.fetch(other).sums
        assert rig.fetch(one).sums
        assert rig.fetch(one).sums
        assert len(one.heads) == 3
        assert one.connections == 2
        assert len(asked_s) == 1
        other.wait_closed(1)
        assert rig.pool.patience_s is None  # such a silence once more says that the store is slow


def test_a_new_connection_may_keep_silent_for_any_time(rig: Rig) -> None:
    """A slow store is not asked twice."""
    rig.pool = Pool(silence_s=0.01)
    late = threading.Event()

    def wait(sock: socket.socket) -> None:
        late.wait()
        sock.sendall(answer(DATA))

    with ScriptedServer(Reply(b"", then=wait)) as server:
        asked = rig.begin(server)
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        late.set()
        assert asked.result().sums
        assert len(server.heads) == 1


def test_an_idle_connection_is_closed_after_a_while(rig: Rig) -> None:
    """A network may forget it. Nothing of its server stays in memory either."""
    rig.pool = Pool(idle_s=0.0)
    with ScriptedServer(answer(DATA)) as server:
        assert rig.fetch(server).sums
        assert servers_at(server.url())
        rig.pool.expire()
        server.wait_closed(1)
        assert not servers_at(server.url())


def servers_at(url: str) -> list[Server]:
    """Return the servers in memory with the address of a url."""
    gc.collect()
    return [
        each for each in gc.get_objects() if isinstance(each, Server) and f"//{each.netloc}" in url
    ]


def test_parts_before_a_cut_are_recorded(rig: Rig) -> None:
    """And no others: the next try need not write them again."""
    rig.path.write_bytes(bytes(len(LARGE)))
    cut = Reply(answer(LARGE)[: len(LARGE) - 1000], Ending.CLOSE)
    with ScriptedServer(cut) as server, pytest.raises(ConnectionError):
        rig.begin(server, data=LARGE, part_bytes=MIB).result()
    assert rig.records == [(index, crc32c(LARGE[index * MIB :][:MIB], 0)) for index in range(2)]
    assert rig.written[: 2 * MIB] == LARGE[: 2 * MIB]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    ("what", "file", "number"),
    [
        ("path", "/dev/full", errno.ENOSPC),
        ("path", "/nowhere/a.part", errno.ENOENT),
        ("journal", "/dev/full", errno.ENOSPC),
    ],
)
def test_file_that_cannot_be_written_has_its_own_error(
    what: str, file: str, number: int, held: bool, rig: Rig
) -> None:
    """Neither the server's nor the connection's, whether the body was kept in memory or not."""
    setattr(rig, what, Path(file))
    with ScriptedServer(answer(DATA)) as server:
        asked = rig.begin(server, held=held)
        rig.gate.commit()
        with pytest.raises(PartFileError) as failed:
            asked.result()
    assert failed.value.cause.errno == number


WAITS = {
    "for the head": (Reply(b"", Ending.HANG), {}),
    "for the rest of the head": (Reply(head()[:-2], Ending.HANG), {}),
    "for the body": (Reply(answer(b"", length=len(DATA)), Ending.HANG), {}),
    "for the rest of the body": (Reply(answer(DATA)[:50_000], Ending.HANG), {}),
    "for the rest of the chunks": (Reply(chunked(DATA)[:50_000], Ending.HANG), {}),
    "for the end of the chunks": (Reply(chunked(DATA)[:-5], Ending.HANG), {}),
    "for credit": (Reply(answer(DATA), Ending.HANG), {"limit_bytes": 5}),
    "for credit before the request": (Reply(answer(DATA), Ending.HANG), {"limit_bytes": 0}),
    "for the commit": (Reply(answer(DATA), Ending.HANG), {"held": True}),
}


def test_bytes_of_a_slow_store_are_written_as_they_arrive(rig: Rig) -> None:
    """A reader may be waiting for them: none waits for a whole block."""
    more = threading.Event()
    reply = answer(DATA)
    with ScriptedServer(
        Reply(
            reply[:-50_000],
            Ending.HANG,
            lambda sock: more.wait(GUARD_S) and sock.sendall(reply[-50_000:-40_000]),
        )
    ) as server:
        rig.begin(server)
        eventually(lambda: rig.gate.written_bytes == len(DATA) - 50_000)
        more.set()
        eventually(lambda: rig.gate.written_bytes == len(DATA) - 40_000)
        assert rig.gate.cancel()


@pytest.mark.parametrize("was_idle", [False, True])
@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_request_ends_wherever_it_waits(wait: str, was_idle: bool, rig: Rig) -> None:
    """Nothing is written from then on, nor asked again; the connection is closed."""
    reply, options = WAITS[wait]
    replies = [answer(DATA), reply] if was_idle else [reply]
    with ScriptedServer(*replies) as server:
        if was_idle:
            assert rig.fetch(server).sums
        rig.path.write_bytes(BLANK)
        asked = rig.begin(server, **options)
        if "before" not in wait:
            server.wait_asked(len(replies))
        with pytest.raises(TimeoutError):
            asked.result(0.02)
        assert rig.gate.cancel()
        written = rig.written
        with pytest.raises(CancelledError):
            asked.result()
        assert rig.written == written == (DATA[: rig.gate.written_bytes] + BLANK)[: len(BLANK)]
        if "before" not in wait:
            server.wait_closed(1)
            assert len(server.heads) == len(replies)
