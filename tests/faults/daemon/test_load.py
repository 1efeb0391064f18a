"""Many rude readers and outsized inputs leave nothing, and the daemon's memory is bounded."""

import random
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from campaign import load, memory
from campaign.harness import QUICK, Row, rows
from shardcache.errors import ExhaustedError
from shardcache.origin.patterns.index_files import parse_index
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.lists.shardlist import read
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import GatedStore

MANY = 40
MANIFEST = "s3://bucket/{00000..09999}.tar"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of one test."""
    with Daemon(tmp_path) as running:
        yield running


@pytest.fixture
def closed() -> Iterator[list[str]]:
    """Shards of which the store tells that they are there, and gives no byte."""
    with GatedStore() as store:
        yield [store.put(f"{number}.tar", make_tar(random_samples(1))) for number in range(MANY)]


@pytest.mark.slow
def test_rude_readers_leave_nothing(tmp_path: Path) -> None:
    """Torn off, deaf or half open, before a store that fails: no wrong byte, and nothing stays."""
    with load.ground(tmp_path, QUICK) as results:
        for row in load.ROWS:
            row.check(results)


@pytest.mark.slow
def test_answers_for_a_reader_that_never_listens_are_not_buffered(daemon: Daemon) -> None:
    """Such a reader has one answer waiting, not hundreds, and others are answered."""
    with RawSession(daemon, "other") as other, RawSession(daemon, "deaf") as deaf:
        other.ask("resolve", urls=[MANIFEST])
        before_bytes = daemon.status()["process"]["rss_bytes"]
        for number in range(400):
            deaf.send(type="resolve", id=number, urls=[MANIFEST])
        for _ in range(5):
            assert len(Shards.unpack(other.ask("resolve", urls=[MANIFEST])["packed"])) == 10_000
        # All answers together are 160 MB.
        assert daemon.status()["process"]["rss_bytes"] - before_bytes < 80_000_000
    eventually(lambda: daemon.sessions() == 0)


def test_need_of_one_shard_is_handled_during_a_wait_for_many(
    daemon: Daemon, closed: list[str]
) -> None:
    """A reader is heard when it needs a shard, however many it has asked for ahead."""
    with RawSession(daemon) as session:
        session.plan(closed, list(range(MANY)))
        for position in range(MANY):
            session.send(type="lease", id=100 + position, position=position)
        session.send(type="need", of=100)
        eventually(lambda: [job["waiting"] for job in daemon.status()["jobs"]] == [1])


def test_a_job_is_called_something_that_can_be_shown(daemon: Daemon) -> None:
    """Names are kept and shown after their job has gone, so they are no place for megabytes."""
    session = RawSession(daemon, "j" * 1_000_000)
    assert session.welcome["error"]["code"] == "protocol"
    assert "the limit is 255" in session.welcome["error"]["message"]
    assert daemon.status()["jobs"] == []


def rss_bytes() -> int:
    """Return how much memory this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """The content of the file `data`."""
    data = random.Random(4).randbytes(200_000)
    (tmp_path / "data").write_bytes(data)
    return data


@pytest.mark.slow
def test_many_open_ranges_take_little_memory(daemon: Daemon, tmp_path: Path, data: bytes) -> None:
    """Reader and daemon take little, and each file gives its own bytes until it is closed."""
    files = ShardcacheFileSystem("file", socket=daemon.socket, block_size=1)
    with ExitStack() as opened:
        before_bytes = (rss_bytes(), daemon.status()["process"]["rss_bytes"])
        held = [opened.enter_context(files.open(tmp_path / "data")) for _ in range(500)]
        for number, file in enumerate(held):
            file.seek(number)
            assert file.read(2) == data[number : number + 2]
        assert daemon.sessions() == len(held)
        # A reader takes some 15 kB of its process, and 30 kB of the daemon.
        assert rss_bytes() - before_bytes[0] < len(held) * 60_000
        assert daemon.status()["process"]["rss_bytes"] - before_bytes[1] < len(held) * 120_000
    eventually(lambda: daemon.sessions() == 0)


@pytest.mark.slow
def test_open_range_beyond_the_limit_is_refused_and_the_others_read_on(
    tmp_path: Path, data: bytes
) -> None:
    """The error says so at once; once a file is closed, there is a place for another."""
    with Daemon(tmp_path, "--socket-connections", "20") as daemon, ExitStack() as opened:
        files = ShardcacheFileSystem("file", socket=daemon.socket, block_size=1)
        held = []
        with pytest.raises(ExhaustedError, match="readers, its maximum"):
            for _ in range(30):
                file = opened.enter_context(files.open(tmp_path / "data"))
                assert file.read(2) == data[:2]
                held.append(file)
        for number, file in enumerate(held):
            file.seek(number)
            assert file.read(1) == data[number : number + 1]
        held[0].close()
        eventually(lambda: files.cat_file(tmp_path / "data", 7, 9) == data[7:9])


@pytest.mark.slow
def test_file_that_is_read_byte_by_byte_takes_little_memory(
    daemon: Daemon, tmp_path: Path, data: bytes
) -> None:
    """Bytes forwards come from those read ahead, and each one backwards is its own range."""
    files = ShardcacheFileSystem("file", socket=daemon.socket)
    before_bytes = (rss_bytes(), daemon.status()["process"]["rss_bytes"])
    with files.open(tmp_path / "data") as file:
        assert b"".join(iter(lambda: file.read(1), b"")) == data
        for place in reversed(range(500)):
            file.seek(place)
            assert file.read(1) == data[place : place + 1]
    assert rss_bytes() - before_bytes[0] < 30_000_000
    assert daemon.status()["process"]["rss_bytes"] - before_bytes[1] < 30_000_000


HALF = 8192  # positions that one reader may plan of a mebibyte


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[memory.Ground]:
    """A daemon with little memory for plans."""
    with memory.ground(tmp_path_factory.mktemp("m"), QUICK) as ground:
        yield ground


@pytest.mark.slow
@rows(memory.ROWS)
def test_hostile_input_takes_no_more_memory_than_it_may(row: Row, small: memory.Ground) -> None:
    """Hostile inputs end in typed errors, large honest ones in answers, by peak memory."""
    result = row.play(small, QUICK)
    assert not result.wrong, result.first_failure
    assert not result.untyped, result.first_failure


@pytest.mark.slow
def test_plans_are_bounded_for_a_reader_and_for_all(tmp_path: Path) -> None:
    """A reader gets half of --plan-memory, all get the whole; others may plan less or wait."""
    url = f"file://{tmp_path}/a.tar"
    with Daemon(tmp_path, "--plan-memory", "1MiB") as daemon, RawSession(daemon) as waiting:
        with RawSession(daemon) as first, RawSession(daemon) as second:
            refused = first.plan([url], [0] * (HALF + 1))["error"]
            assert refused["code"] == "capacity"
            assert "--plan-memory" in refused["remedy"]
            answer = first.plan([f"{url}{number}" for number in range(3000)], [])
            assert answer["error"]["code"] == "capacity"
            assert first.ask("extend", order=[])["error"]["code"] == "protocol", (
                "what is refused is not kept"
            )
            for session in (first, second):
                assert session.plan([url], [0] * (HALF - 280))["type"] == "ok"
                assert session.ask("extend", order=[0] * 100)["error"]["code"] == "capacity"
            assert "all plans together" in waiting.plan([url], [0] * 400)["error"]["message"]
        eventually(lambda: waiting.plan([url], [0] * 100)["type"] == "ok")


@pytest.mark.parametrize(
    ("space", "member"), [("", ""), (" " * 600_000, ""), ("", '"' + "x" * 200_000 + '", ')]
)
def test_an_index_is_read_row_by_row_like_any_json(space: str, member: str) -> None:
    """Spaces, long rows, split numbers and further members are read as by `json.loads`."""
    rows = [
        f'{{"url": "{"d" * length}/a.tar", "nsamples": {length}}}' for length in range(8_000, 8_060)
    ]
    text = f'{{{space}"x": [{member}1], "shardlist": [{space}{",".join(rows)}], "n": 12}} '
    assert [ref.samples for ref in parse_index("s3://b/i.json", text.encode())] == list(
        range(8_000, 8_060)
    )
    for broken in (
        text + "x",
        text.rstrip()[:-1],
        text.replace("],", "]", 1),
        text.replace(":", "", 1),
    ):
        with pytest.raises(ValueError, match="character"):
            list(read(broken.encode()))


def test_an_index_has_a_limit() -> None:
    """Of rows, and of what a single value may be."""
    with pytest.raises(ValueError, match="more than 2 shards"):
        list(read(b'{"shardlist": [{"url": "a"}, {"url": "b"}, {"url": "c"}]}', max_shards=2))
    with pytest.raises(ValueError, match="longer than"):
        list(read(b'{"x": [' + b"[]," * 200_000 + b'[]], "shardlist": []}'))


def test_an_index_of_wide_characters_takes_no_more_memory() -> None:
    """One character of four bytes does not make all others of the file as wide in memory."""
    rows = ",".join(f'{{"url": "{number}{"d" * 8_000}.tar"}}' for number in range(2_000))
    index = f'{{"shardlist": [{{"url": "\N{DROMEDARY CAMEL}.tar"}}, {rows}]}}'.encode()
    tracemalloc.start()
    try:
        read_bytes = sum(len(url) for urls, *_ in read(index) for url in urls)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * read_bytes
