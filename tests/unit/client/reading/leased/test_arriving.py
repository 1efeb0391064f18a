"""ArrivingShard: exactly those samples of a shard that have come, the same as of the whole."""

import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from shardcache.errors import (
    CorruptShardError,
    NotATarError,
    SampleError,
    ShardError,
    TornSampleError,
    TruncatedShardError,
)
from shardcache.shared.protocol import Arriving
from shardcache.shared.tarindex.grouping import index_tar
from shardcache_client.reading.leased.shards import ArrivingShard, MappedShard, ShardPlace
from shardcache_client.samples.mapped_file import ShardGoneError
from support.shards.odd_tars import Row, formats, members, pack_rows
from support.shards.tars import make_tar, pack, published, random_samples

URL = "s3://bucket/train-000000.tar"
LONG_NAME = "folder/" * 40 + "000001.jpg"


class Download:
    """A shard on its way: a file of the final size, with filler where nothing has arrived."""

    def __init__(self, path: Path, tar: bytes, steps: Iterable[int], blank: int = 0) -> None:
        self.path = path
        self.asked: list[int] = []
        self.ready_bytes = 0
        self._tar = tar
        self._steps = iter(steps)
        path.write_bytes(bytes([blank]) * len(tar))
        self._inode = path.stat().st_ino
        self._advance(next(self._steps, 0))

    def _advance(self, ready_bytes: int) -> None:
        with open(self.path, "r+b") as file:
            file.write(self._tar[:ready_bytes])
        self.ready_bytes = ready_bytes

    def grant(self) -> Arriving:
        """Say what is ready, as the daemon does."""
        return Arriving(
            type="arriving",
            id=0,
            lease=1,
            url=URL,
            version="v1",
            path=str(self.path),
            inode=self._inode,
            size_bytes=len(self._tar),
            ready_bytes=self.ready_bytes,
        )

    def more(self, beyond: int) -> Arriving | None:
        """Have more arrive, if there is more to come."""
        assert beyond >= self.ready_bytes, "asked for what is there"
        self.asked.append(beyond)
        for ready_bytes in self._steps:
            self._advance(ready_bytes)
            if ready_bytes > beyond:
                return self.grant()
        return None

    def open(self) -> ArrivingShard:
        """Open it as a reader does."""
        return ArrivingShard(self.grant(), self.more)


def outcomes(shard: ArrivingShard | MappedShard, start: int = 0) -> Iterator[dict[str, Any] | str]:
    """Each sample from `start` on, or what is said of it."""
    while True:
        try:
            for sample in shard.samples(start):
                start += 1
                yield sample
            return
        except SampleError as exn:
            yield str(exn)
            start += 1


def whole(path: Path, tar: bytes) -> list[dict[str, Any] | str]:
    """Samples that a reader gives of the published shard."""
    with closing(MappedShard(ShardPlace(*published(path, tar, URL)), URL)) as reader:
        return list(outcomes(reader))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a shard that arrives."""
    return tmp_path / "shard.part"


@settings(deadline=None)
@given(
    rows=members,
    format_=formats,
    cuts=st.lists(st.floats(0, 1), max_size=12),
    blank=st.sampled_from([0, 0xAA]),
)
@example(
    rows=[("a.jpg", tarfile.REGTYPE, b""), ("b.jpg", tarfile.REGTYPE, b"")],
    format_=0,
    cuts=[0.09],
    blank=0,
)
def test_samples_equal_those_of_the_index(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    format_: int,
    cuts: list[float],
    blank: int,
) -> None:
    """Any tar in any steps gives all samples but the last, with faults and the same numbers.

    Of one with torn samples, nothing is published; what comes of it is in test_samples.py.
    """
    folder = tmp_path_factory.getbasetemp()
    tar = pack_rows(rows, format_)
    try:
        expected = whole(folder / "whole.tar", tar)
    except TornSampleError:
        reject()
    steps = sorted(int(cut * len(tar)) for cut in cuts)
    with closing(Download(folder / "random.part", tar, [*steps, len(tar)], blank).open()) as shard:
        assert list(outcomes(shard)) == expected[:-1]


def test_lines_come_as_they_arrive(path: Path) -> None:
    """Each line but the last comes once the line feed behind the next has arrived."""
    tar = pack(
        [
            ("0.txt", b"first"),
            ("__lines__/1.txt", b"one\ntwo\nthree\n"),
            ("__lines__/4.txt", b"four\nfive"),
        ]
    )
    expected = whole(path.with_suffix(".tar"), tar)
    assert [sample["txt"] for sample in expected if isinstance(sample, dict)] == [
        b"first",
        b"one",
        b"two",
        b"three",
        b"four",
        b"five",
    ]
    counts = set()
    at_line_feeds = {
        at + beyond for at, byte in enumerate(tar) if byte == ord("\n") for beyond in (0, 1)
    }
    for ready_bytes in sorted({*range(0, len(tar), 61), *at_line_feeds}):
        with closing(Download(path, tar, [ready_bytes], blank=0xAA).open()) as shard:
            given = list(outcomes(shard))
        assert given == expected[: len(given)]
        counts.add(len(given))
    assert counts == set(range(6))


VARIOUS = [
    ("1.jpg", b"1" * 700),
    ("1.cls", b""),
    (LONG_NAME, b"2"),
    ("é" * 60 + ".jpg", b""),
    ("3.jpg", b"3" * 512),
    ("3.cls", b"3"),
    ("4.jpg", b"4"),
]


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sample_comes_with_the_header_after_it_and_no_sooner(path: Path, format_: int) -> None:
    """Only whole samples come, wherever the beginning ends: in a header, name or member."""
    tar = pack(VARIOUS, format=format_)
    expected = whole(path.with_suffix(".tar"), tar)
    tables = index_tar(path.with_suffix(".tar"), URL)
    # Where the first member of each sample but the first begins.
    header_ends = [tables.starts[first] for first in tables.member_ends[:-1]]
    counts = set()
    for ready_bytes in sorted(
        {*range(0, len(tar), 61), *header_ends, *(end - 1 for end in header_ends)}
    ):
        with closing(Download(path, tar, [ready_bytes]).open()) as shard:
            given_ = list(outcomes(shard))
        assert given_ == expected[: sum(end <= ready_bytes for end in header_ends)]
        counts.add(len(given_))
    assert counts == set(range(len(expected)))


def test_more_bytes_are_requested_only_when_samples_run_out(path: Path) -> None:
    """Arrived bytes need no question, which names the bytes for the next header."""
    tar = make_tar(random_samples(4, {"bin": 1000}))  # a member and its header: 1536 bytes
    download = Download(path, tar, [2 * 1536 + 512, 2 * 1536 + 600, len(tar)])
    with closing(download.open()) as shard:
        samples = shard.samples()
        assert [next(samples)["__key__"] for _ in range(2)] == ["000000", "000001"]
        assert download.asked == []
        assert next(samples)["__key__"] == "000002"
        assert download.asked == [3 * 1536 + 511], (
            "for a header of 512 bytes, not for the window it is read by"
        )
        assert list(samples) == []
        assert download.asked[1:] == [len(tar)], "the end is left to the daemon"


def test_many_small_and_some_large_members(path: Path) -> None:
    """Headers that share a window and larger members are found at every step."""
    sizes = [0, 1, 100, 70_000, 512, 3, 200_000] * 20
    tar = pack(
        (f"{number // 2:04d}.{number % 2}", bytes([number % 251]) * size)
        for number, size in enumerate(sizes)
    )
    expected = whole(path.with_suffix(".tar"), tar)
    with closing(
        Download(path, tar, [*range(100_000, len(tar), 100_003), len(tar)]).open()
    ) as shard:
        assert list(outcomes(shard)) == expected[:-1]


def test_a_tar_without_its_end_is_the_daemons_to_judge(path: Path) -> None:
    """The samples come and the rest is asked for, without an error made up."""
    tar = make_tar(random_samples(3, {"bin": 1024}))[: 3 * 1536]
    download = Download(path, tar, [len(tar)])
    with closing(download.open()) as shard:
        assert [sample["__key__"] for sample in shard.samples()] == ["000000", "000001"]
    assert download.asked == [len(tar)]


@pytest.mark.parametrize(
    ("at", "error", "given_"),
    [(0, NotATarError, 0), (1536, CorruptShardError, 0), (3 * 1536, CorruptShardError, 2)],
)
def test_damage_is_reported_where_it_is_found(
    path: Path, at: int, error: type[ShardError], given_: int
) -> None:
    """Of a damaged tar, the samples in front of the damage come, then the error, with the url."""
    tar = bytearray(make_tar(random_samples(4, {"bin": 1000})))
    tar[at] ^= 1
    with closing(Download(path, bytes(tar), [len(tar)]).open()) as shard:
        samples = shard.samples()
        keys = [next(samples)["__key__"] for _ in range(given_)]
        with pytest.raises(error) as caught:
            next(samples)
    assert keys == ["000000", "000001"][:given_]
    assert caught.value.url == URL


def test_a_member_that_leads_out_of_the_file(path: Path) -> None:
    """A member longer than the shard is an error at once, not a vain question."""
    huge = tarfile.TarInfo("b.bin")
    huge.size = 1 << 40
    tar = pack([("a.bin", b"1")])[:1024] + huge.tobuf() + bytes(4096)
    download = Download(path, tar, [len(tar)])
    with closing(download.open()) as shard, pytest.raises(TruncatedShardError, match=r"b\.bin"):
        list(shard.samples())
    assert download.asked == []


def test_a_file_that_is_not_there_or_not_the_one(path: Path) -> None:
    """The error says that a published or dropped file is gone. Another size is refused."""
    download = Download(path, make_tar(random_samples(2)), [1000])
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    os.truncate(path, 512)
    with pytest.raises(CorruptShardError, match="512 bytes instead of") as caught:
        download.open()
    assert caught.value.url == URL
    path.rename(path.with_suffix(".former"))
    with pytest.raises(ShardGoneError, match="cannot read"):
        download.open()
    path.write_bytes(bytes(len(make_tar(random_samples(2)))))
    with pytest.raises(ShardGoneError, match="another file has taken its place"):
        download.open()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
