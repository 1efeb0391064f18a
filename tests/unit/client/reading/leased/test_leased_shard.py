"""leased_shard.py: a shard's samples, whole and in order, whatever the daemon does."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import (
    CacheDirError,
    CorruptShardError,
    CountMismatchError,
    NoDaemonError,
    OriginUnavailableError,
    SampleError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.shared.protocol import ShardRef
from shardcache_client.batches.maker import BadCounts
from shardcache_client.batches.rank_chunks import RankChunks
from shardcache_client.batches.rank_work import Reading
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import Session
from shardcache_client.daemon.session_pool import SessionPool
from shardcache_client.handlers import ignore_and_continue, reraise
from shardcache_client.order.dealing.deal import ShardDeal
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Resume
from shardcache_client.reading.epochs.epoch_plans import SampleForm
from shardcache_client.reading.epochs.lone_reader import LoneShardReader
from shardcache_client.reading.leased.joined_samples import find_partners
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.stages.pipeline import Pipeline
from support.network.peer import (
    Json,
    Peer,
    Script,
    Step,
    accepted,
    arriving,
    begun,
    granted,
    refused,
    scripted,
)
from support.programs.daemon import eventually
from support.shards.tars import make_tar, pack, published, random_samples

READER = ReaderIdentity("job")
URLS = tuple(f"s3://bucket/{number}.tar" for number in range(2))
PLAN = Plan.of(Manifest.of(map(ShardRef, URLS)), 0, [0, 1])
TAR = make_tar(random_samples(6, {"bin": 1000}))  # a member and its header: 1536 bytes
FOUR_READY = 4 * 1536 + 512
KEYS = [f"{number:06d}" for number in range(6)]


class Folder:
    """A cache folder as a daemon has it, and steps of scripts that grant what is in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.mkdir()

    def arriving(self, lease: int, ready_bytes: int, tar: bytes = TAR) -> Step:
        """Have the beginning of a shard arrive, and grant it."""
        path = self._path / "v1.part"

        def step(peer: Peer) -> None:
            with open(path, "r+b" if path.exists() else "w+b") as file:
                os.truncate(file.fileno(), len(tar))
                file.write(tar[:ready_bytes])
            arriving(lease, ready_bytes, path=str(path), version="v1", size_bytes=len(tar))(peer)

        return step

    def whole(self, lease: int, tar: bytes = TAR, version: str = "v1", **fields: Any) -> Step:
        """Publish a shard, and grant it."""
        return lambda peer: granted(lease, **self.publish(tar, version), **fields)(peer)

    def publish(self, tar: bytes, version: str) -> Json:
        """Publish a shard; return the fields of its grant."""
        path, index_path = published(self._path / f"{version}.tar", tar, URLS[0])
        return {"path": str(path), "index_path": str(index_path), "version": version}

    def lose(self, _peer: Peer) -> None:
        """Remove the beginning of the shard."""
        (self._path / "v1.part").unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """The cache folder of a test."""
    return Folder(tmp_path / "cache")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """The path of a daemon's socket."""
    return tmp_path / "s.sock"


@contextmanager
def passing(
    socket: Path,
    *scripts: Script,
    count: int | None = None,
    span: tuple[int, int | None] = (0, None),
    **patience: float,
) -> Iterator[tuple[LeasedShard, list[Json]]]:
    """Yield a passage through the plan's first shard by scripted daemons, and the messages."""
    with scripted(socket, *scripts) as heard:
        session = Session(DaemonChoice(socket), READER, Patience(**patience), partial_reads=True)
        session.declare(PLAN)
        leased_shard = LeasedShard(session, session.lease(0), count=count, span=span)
        try:
            leased_shard.open()
            yield leased_shard, heard
        finally:
            leased_shard.close()
            session.close()


def keys(leased_shard: LeasedShard) -> list[Any]:
    """Keys of the samples that are still to come."""
    return [sample["__key__"] for sample in leased_shard.samples()]


def test_bad_samples_are_errors_in_their_places(socket: Path, folder: Folder) -> None:
    """A bad sample in the beginning and one in the rest raise once; those around them come."""
    tar = pack(
        [(f"{n}.x", b"") for n in range(2)]
        + [("2.x", b"")] * 2
        + [("3.x", b"")] * 2
        + [("4.x", b"")]
    )
    found: list[str] = []
    with passing(socket, begun(folder.arriving(7, 5 * 512, tar), folder.whole(7, tar))) as (
        leased_shard,
        _,
    ):
        for _ in range(2):
            with pytest.raises(SampleError) as caught:
                found += (sample["__key__"] for sample in leased_shard.samples())
            found.append(caught.value.message[:14])
        found += keys(leased_shard)
    assert found == ["0", "1", "the sample '2'", "the sample '3'", "4"]


def test_a_failure_of_the_rest_names_what_was_given(socket: Path, folder: Folder) -> None:
    """The daemon's error keeps its remedy and tells the samples given, with the last key."""
    error = CorruptShardError("the checksum differs", url=URLS[0], remedy="look")
    script = begun(folder.arriving(7, FOUR_READY), refused(error))
    with (
        passing(socket, script) as (leased_shard, heard),
        pytest.raises(CorruptShardError) as caught,
    ):
        keys(leased_shard)
    assert caught.value.message == (
        "the checksum differs; its first 4 samples, up to key '000003', had already been yielded"
    )
    assert caught.value.yielded == 4
    assert caught.value.url == URLS[0]
    assert caught.value.remedy == "look"
    assert "release" not in [message["type"] for message in heard], "an error ends the lease"


@pytest.mark.parametrize("count", [3, 5, 7])
def test_number_of_samples_other_than_declared_is_an_error(
    socket: Path, folder: Folder, count: int
) -> None:
    """No sample of a larger shard is left out in silence, nor made up for a smaller one."""
    script = begun(folder.arriving(7, FOUR_READY), folder.whole(7, samples=len(KEYS)))
    with passing(socket, script, count=count, span=(0, count)) as (leased_shard, _):
        with pytest.raises(
            CountMismatchError, match=f"holds 6 samples, but the dataset's list says {count}"
        ) as caught:
            keys(leased_shard)
        assert caught.value.yielded == min(count - 1, 4)


@pytest.mark.parametrize("span", [(0, 2), (1, 4), (3, 5), (4, 6), (0, 6)])
def test_a_part_of_a_shard(socket: Path, folder: Folder, span: tuple[int, int]) -> None:
    """Whoever reads some of its samples gets those, from its beginning or from the whole."""
    whole = [folder.whole(7, samples=len(KEYS))] if span[1] > 4 else []
    with passing(socket, begun(folder.arriving(7, FOUR_READY), *whole), count=6, span=span) as (
        leased_shard,
        _,
    ):
        assert keys(leased_shard) == KEYS[slice(*span)]


@pytest.mark.parametrize(
    ("ready_bytes", "error", "version"),
    [
        (FOUR_READY, OriginUnavailableError("503"), "v1"),
        (100, ShardChangedError("412"), "v2"),
        (100, CorruptShardError("differs"), "v2"),
    ],
)
def test_a_shard_that_fails_is_requested_once_more(
    socket: Path, folder: Folder, ready_bytes: int, error: ShardcacheError, version: str
) -> None:
    """A short outage costs no sample; another version is read if none was given."""
    script = begun(
        folder.arriving(7, ready_bytes), refused(error), folder.whole(8, version=version)
    )
    with passing(socket, script) as (leased_shard, _):
        assert keys(leased_shard) == KEYS


def test_damage_that_the_reader_meets_itself_names_what_was_given(
    socket: Path, folder: Folder
) -> None:
    """Damage in what has arrived does so, too, and the lease goes back."""
    damaged = bytearray(TAR)
    damaged[3 * 1536] ^= 1
    with passing(socket, begun(folder.arriving(7, len(TAR), bytes(damaged)))) as (
        leased_shard,
        heard,
    ):
        with pytest.raises(CorruptShardError, match="up to key '000001'") as caught:
            keys(leased_shard)
        leased_shard.close()
        eventually(lambda: heard[-1] == {"type": "release", "lease": 7})
    assert caught.value.yielded == 2


def dying(*steps: Step) -> Script:
    """Play a daemon that grants the beginning of a shard and dies when it is asked for more."""
    return begun(*steps, Peer.hear, stays=False)


def test_the_next_daemon_has_less_of_it(socket: Path, folder: Folder) -> None:
    """A daemon that starts the download anew writes another file, which is read on."""
    again = begun(folder.arriving(1, 700), folder.arriving(1, len(TAR)), folder.whole(1))
    with passing(socket, dying(folder.arriving(7, FOUR_READY), folder.lose), again) as (
        leased_shard,
        heard,
    ):
        assert keys(leased_shard) == KEYS
    assert [message["lease"] for message in heard if message["type"] == "more"] == [7, 1, 1]


def test_another_version_is_not_read_on(socket: Path, folder: Folder) -> None:
    """The error says what was given of the replaced shard, and the lease goes back."""
    scripts = dying(folder.arriving(7, FOUR_READY)), begun(folder.whole(5, version="v2"))
    with passing(socket, *scripts) as (leased_shard, heard):
        with pytest.raises(ShardChangedError, match="up to key '000003'") as caught:
            keys(leased_shard)
        leased_shard.close()
        eventually(lambda: heard[-1] == {"type": "release", "lease": 5})
    assert caught.value.yielded == 4


def test_a_daemon_that_stays_away_in_the_middle(socket: Path, folder: Folder) -> None:
    """The error names the samples that had been given, too, if no daemon comes back."""
    script = dying(folder.arriving(7, FOUR_READY))
    with (
        pytest.raises(NoDaemonError) as caught,
        passing(socket, script, limit_s=0.5) as (leased_shard, _),
    ):
        keys(leased_shard)
    assert caught.value.yielded == 4


def test_a_beginning_that_is_no_longer_there_is_whole_or_given_up(
    socket: Path, folder: Folder
) -> None:
    """The daemon is asked what became of a shard that moved before it was opened."""
    with passing(socket, begun(arriving(3, 1024), folder.whole(3))) as (leased_shard, heard):
        assert keys(leased_shard) == KEYS
    assert [message["type"] for message in heard[2:4]] == ["lease", "more"]


@pytest.mark.parametrize("is_there", [False, True])
def test_unpublished_file_that_has_moved_is_waited_for(
    socket: Path, folder: Folder, is_there: bool
) -> None:
    """Publishing moves it; a file that has taken its place is never read."""

    def moved(peer: Peer) -> None:
        granted(3, inode=1, **(folder.publish(bytes(len(TAR)), "v1") if is_there else {}))(peer)

    with passing(socket, begun(moved, folder.whole(3))) as (leased_shard, heard):
        assert keys(leased_shard) == KEYS
    assert [message["type"] for message in heard[2:4]] == ["lease", "more"]


def returned(lease: int) -> Step:
    """Return the step in which a lease comes back of which nothing was read."""

    def step(peer: Peer) -> None:
        assert peer.hear() == {"type": "release", "lease": lease, "read": False}

    return step


def test_a_file_that_was_let_go_is_asked_for_again(socket: Path, folder: Folder) -> None:
    """A shard leased ahead may be evicted before it is opened: the reader asks again."""
    with passing(socket, begun(granted(3), returned(3), folder.whole(4))) as (leased_shard, heard):
        assert keys(leased_shard) == KEYS
    assert [message["position"] for message in heard if message["type"] == "lease"] == [0, 0]


def test_a_file_that_is_never_there(socket: Path) -> None:
    """The error comes after a handful of tries, and every lease went back."""
    steps = [step for lease in range(5) for step in (granted(lease), returned(lease))]
    with (
        pytest.raises(CacheDirError, match=r"nowhere\.idx") as caught,
        passing(socket, begun(*steps, stays=False)),
    ):
        pass
    assert "mount" in caught.value.remedy


@pytest.mark.parametrize("handler", [reraise, ignore_and_continue])
def test_a_handler_decides_about_a_shard_that_fails_midway(
    socket: Path, folder: Folder, handler: Any
) -> None:
    """Given samples stay given, and a reader that goes on has the next shard asked for."""

    def script(peer: Peer) -> None:
        peer.begin()
        folder.arriving(7, FOUR_READY)(peer)
        ahead = peer.hear()["id"]
        refused(CorruptShardError("damaged", url=URLS[0]))(peer)
        peer.lend(
            ahead, 8, url=URLS[1], **folder.publish(make_tar(random_samples(2, first=100)), "next")
        )
        peer.stay()

    found: list[Any] = []
    seen: list[int] = []

    def on_error(exn: Any) -> bool:
        seen.append(exn.yielded)
        return bool(handler(exn))

    with scripted(socket, script):
        pool = SessionPool(DaemonChoice(socket), Patience(), partial_reads=True)
        sessions = ReaderSessions(pool, READER)
        form = SampleForm(Manifest.of(PLAN.shards))
        reading = Reading(ShardDeal(len(PLAN.shards)), form, Pipeline(), sessions, on_error)
        chunks = RankChunks(reading, Resume(Progress()), Topology(), size=1)
        with nullcontext() if handler is ignore_and_continue else pytest.raises(CorruptShardError):
            found += (sample["__key__"] for _, sample in chunks.placed_items(BadCounts(), deque()))
    assert found == KEYS[:4] + (["000100", "000101"] if handler is ignore_and_continue else [])
    assert seen == [4]


def test_lone_reader_opens_a_shard_again_that_failed_midway(socket: Path, folder: Folder) -> None:
    """The failure belongs to one sample; a new lease reads the shard's next one."""
    down = OriginUnavailableError("down", url=URLS[0])
    more_and_second_try = (refused(down), refused(down))
    script = begun(folder.arriving(7, FOUR_READY), *more_and_second_try, accepted, folder.whole(8))

    def open_session() -> Session:
        return Session(DaemonChoice(socket), READER, Patience(), partial_reads=True)

    with (
        scripted(socket, script),
        closing(LoneShardReader(open_session, SampleForm(PLAN.manifest))) as reader,
    ):
        assert isinstance(reader.read((0, 5)), OriginUnavailableError)
        sample = reader.read((0, 5))
    assert isinstance(sample, dict)
    assert sample["__key__"] == KEYS[5]


KEYS_OF_SHARD = st.lists(st.integers(0, 9).map(lambda number: b"%d" % number), max_size=8)


@given(KEYS_OF_SHARD, st.lists(KEYS_OF_SHARD, max_size=3))
def test_partners_have_the_same_key_and_no_other_has(
    keys: list[bytes], others: list[list[bytes]]
) -> None:
    """Neither here nor in any of the other shards, in whatever order."""
    flat = [key for some in others for key in some]
    for key, place in zip(keys, find_partners(keys, flat), strict=True):
        fitting = [number for number, other in enumerate(flat) if other == key]
        assert place == (fitting[0] if len(fitting) == keys.count(key) == 1 else None)
