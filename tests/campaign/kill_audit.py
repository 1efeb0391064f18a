"""Remains of a killed daemon in its cache folder, and what the next daemon makes of them."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from campaign.disk_model import data_ranges
from campaign.range_reads import Span, noted, read_ranges
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR
from shardcache.store.keys import is_key
from shardcache.store.part_file import JOURNAL_BYTES
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession

Problem = tuple[str, str]
"""A kind of `Result`, and words."""

_MOVE_S = 1.0  # longer than the daemon takes to move a shard to quarantine
_RECORD_BYTES = 8
_DROPPED = 1 << 31  # in a record's number: the part is no longer in the file
_BLOCK_BYTES = 4096  # of the filesystem


@dataclass(frozen=True, slots=True)
class Source:
    """Contents of the object store."""

    tars: dict[str, bytes]  # url → the plain tar that readers must get
    stored_bytes: dict[str, int]  # url → size in the store
    env: dict[str, str] = field(default_factory=dict)  # variables by which a daemon finds the store


class Parts(NamedTuple):
    """The parts of an object in a file of the cache, as the file's journal lists them."""

    path: Path
    url: str
    version: str
    size_bytes: int
    part_bytes: int
    numbers: frozenset[int]

    @classmethod
    def read(cls, journal: Path) -> Self | None:
        """Return the parts that a journal lists; None if it lists none, or has no file."""
        title, _, records = journal.read_bytes().partition(b"\n")
        path = journal.with_suffix(PART)
        if not records or not path.exists():
            return None
        about = json.loads(title)
        assert path.stat().st_size == about["size_bytes"]
        numbers: set[int] = set()
        for at in range(0, len(records) - _RECORD_BYTES + 1, _RECORD_BYTES):
            number = int.from_bytes(records[at : at + 4], "little")
            if number & _DROPPED:
                numbers.discard(number ^ _DROPPED)
            elif number * about["part_bytes"] < about["size_bytes"]:
                numbers.add(number)  # any other is what a power cut has left in a record's place
        return cls(path, **about, numbers=frozenset(numbers))

    def span(self, number: int) -> Span:
        """Return the range of a part."""
        start = number * self.part_bytes
        return Span(self.url, start, min(start + self.part_bytes, self.size_bytes))

    @property
    def kept_bytes(self) -> int:
        """Number of bytes in the parts."""
        spans = map(self.span, self.numbers)
        return sum(end - start for _, start, end in spans)

    def covers(self, span: Span) -> bool:
        """Return whether all parts of a range are there."""
        first = span.start // self.part_bytes
        stop = -(-span.end // self.part_bytes)
        return span.url == self.url and self.numbers.issuperset(range(first, stop))

    def spoilt(self, data: bytes) -> list[Span]:
        """Return the parts whose bytes in the file are not those of the object."""
        cached = self.path.read_bytes()
        spans = map(self.span, sorted(self.numbers))
        return [
            span for span in spans if cached[span.start : span.end] != data[span.start : span.end]
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """Remains of a crash on the disk.

    Attributes:
        published: paths of the tars that are visible.
        missing_bytes: what has to be fetched for the rest, sound parts taken off.
        spans: the sound parts of objects that are not published.
        spoilt: finished parts with other bytes than the object's.
        forgotten: ranges that a daemon has granted, and that are no longer there.
        may_fetch: whether parts among `spans` may have been lost, and be fetched again.
    """

    published: frozenset[Path]
    missing_bytes: int
    spans: tuple[Span, ...] = ()
    spoilt: tuple[Span, ...] = ()
    forgotten: tuple[Span, ...] = ()
    may_fetch: bool = False


def look(cache: Path, source: Source, *, may_fetch: bool = False) -> Found:
    """Return what is published in a folder that no daemon uses, and what is still to be fetched.

    Args:
        may_fetch: whether finished parts may have been lost.
    """
    published = _published(cache, source)
    missing = set(source.tars) - set(published.values())
    missing_bytes = sum(source.stored_bytes[url] for url in missing)
    if may_fetch:
        return Found(frozenset(published), missing_bytes, may_fetch=True)

    kept = [parts for parts in _unfinished(cache) if parts.url in missing]
    kept = [parts for parts in kept if parts.size_bytes == source.stored_bytes[parts.url]]
    spoilt: list[Span] = []
    for parts in kept:
        tar = source.tars[parts.url]
        if len(tar) == parts.size_bytes:  # it is not compressed
            spoilt += parts.spoilt(tar)
    spans = [parts.span(number) for parts in kept for number in sorted(parts.numbers)]
    sound = [span for span in spans if span not in spoilt]
    granted = [span for span in noted(cache.parent) if span.url in missing]
    forgotten = [span for span in granted if not any(parts.covers(span) for parts in kept)]
    return Found(
        frozenset(published),
        missing_bytes - sum(span.end - span.start for span in sound),
        tuple(sound),
        tuple(spoilt),
        tuple(forgotten),
    )


def _published(cache: Path, source: Source) -> dict[Path, str]:
    """Return the url of each visible tar with the bytes that readers must get."""
    urls = {data: url for url, data in source.tars.items()}
    published: dict[Path, str] = {}
    for tar in cache.glob(f"shards/*/*{TAR}"):
        url = urls.get(tar.read_bytes())
        if url is not None and tar.with_suffix(SIDECAR).exists():
            published[tar] = url
    return published


def _unfinished(cache: Path) -> Iterator[Parts]:
    for journal in cache.glob(f"partial/*{JOURNAL}"):
        parts = Parts.read(journal)
        if parts is not None:
            yield parts


def title_of(journal: Path) -> dict[str, Any]:
    """Return what a journal says of its object; nothing if it is damaged, or not there."""
    try:
        title = json.loads(journal.read_bytes().partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    return title if isinstance(title, dict) else {}


def audit(
    daemon: Daemon, source: Source, found: Found, *, reads_ranges: bool = False
) -> list[Problem]:
    """Return what is wrong with a daemon that came back.

    Args:
        reads_ranges: read the parts that were found as ranges, before the whole objects.
    """
    problems = list(bookkeeping(daemon, "after the start"))
    if reads_ranges:
        problems += _ranges_served(daemon, source, found)
        problems += bookkeeping(daemon, "after the ranges")
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    shards = daemon.status()["cache"]["shards"]
    if shards != len(found.published):
        words = f"{len(found.published)} shards were published, {shards} are found sound"
        problems.append(("lost", words))
    problems += _served(daemon, source)
    fetched_bytes = daemon.status()["counters"]["origin_bytes"]
    if fetched_bytes > found.missing_bytes:
        words = f"{fetched_bytes} bytes were fetched, {found.missing_bytes} were missing"
        problems.append(("lost", words))
    for tar in found.published:
        if not tar.exists():
            problems.append(("lost", f"{tar} was published and is gone"))
    eventually(lambda: not daemon.status()["transfers"])
    return problems + list(bookkeeping(daemon, "in the end"))


def _ranges_served(daemon: Daemon, source: Source, found: Found) -> Iterator[Problem]:
    """Read parts that are cached, the last first: what is read in order is also fetched ahead."""
    backwards = found.spans[::-1]
    for span, data in zip(backwards, read_ranges(daemon, backwards), strict=True):
        if data != source.tars[span.url][span.start : span.end]:
            yield "wrong", f"{span}: other bytes than the store's"
    fetched_bytes = daemon.status()["counters"]["origin_bytes"]
    if fetched_bytes and not found.may_fetch:
        yield "lost", f"{fetched_bytes} bytes were fetched for ranges that were cached"


def _served(daemon: Daemon, source: Source) -> list[Problem]:
    problems: list[Problem] = []
    urls = list(source.tars)
    with RawSession(daemon) as session:
        session.plan(urls, list(range(len(urls))))
        for position, url in enumerate(urls):
            lease = session.take(position)
            if lease["type"] != "leased":
                problems.append(("lost", f"{url}: {lease}"))
            elif Path(lease["path"]).read_bytes() != source.tars[url]:
                problems.append(("wrong", f"{url}: other bytes than the store's"))
    return problems


def bookkeeping(daemon: Daemon, when: str) -> Iterator[Problem]:
    """Yield how what the daemon believes differs from what lies on the disk."""
    cache = daemon.cache_dir
    taken = _taken(daemon)
    on_disk_bytes = sum(taken.values())
    used_bytes = daemon.status()["cache"]["used_bytes"]
    # While an object is open for parts, its journal counts as a block, even if it lists none yet.
    most_bytes = on_disk_bytes + sum(
        JOURNAL_BYTES - size
        for path, size in taken.items()
        if path.suffix == JOURNAL and size < JOURNAL_BYTES
    )
    if not on_disk_bytes <= used_bytes <= most_bytes:
        names = sorted(f"{path.relative_to(cache)} {size}" for path, size in taken.items())
        words = f"used_bytes is {used_bytes}, {on_disk_bytes} lie on the disk: {names}"
        yield "wrong", f"{when}, {words}"
    for path in _strays(cache):
        yield "wrong", f"{when}, {path} lies about"


def _taken(daemon: Daemon) -> dict[Path, int]:
    """Return the sizes of all files that take space of the cache.

    A file that is moved to quarantine during the listing may be in it twice, or not at all. So it
    is listed until that is the same twice.
    """
    last: dict[Path, int] = {}
    while True:
        with suppress(FileNotFoundError):  # one was moved between the listing and the look at it
            taken = _listed(daemon)
            if taken == last:
                return taken
            last = taken


def _listed(daemon: Daemon) -> dict[Path, int]:
    open_parts = _open_parts(daemon)
    folders = [daemon.cache_dir / name for name in ("shards", "partial", "quarantine")]
    return {
        path: _size_bytes(path, open_parts) for folder in folders for path in folder.rglob("*.*")
    }


def _open_parts(daemon: Daemon) -> dict[str, Parts]:
    """Return the objects of which the daemon keeps single parts, by their cache keys."""
    rows = Counter((row["url"], row["version"]) for row in daemon.shards())
    found = {}
    for journal in daemon.cache_dir.glob(f"partial/*{JOURNAL}"):
        title = title_of(journal)  # a power cut may have spoilt it: then nobody keeps its parts
        key = journal.stem
        # After a power cut, a file of parts may lie beside the published object: then it is kept
        # only if the daemon names both.
        tar = daemon.cache_dir / "shards" / key[:2] / (key + TAR)
        if rows[title.get("url"), title.get("version")] > tar.exists():
            parts = Parts.read(journal)
            if parts is not None:
                found[key] = parts
    return found


def _size_bytes(path: Path, open_parts: dict[str, Parts]) -> int:
    """Return what a file takes of the disk.

    A file that was to be allocated when the daemon was killed takes nothing. A file of single parts
    must have no byte beside them.
    """
    found = path.stat()
    parts = open_parts.get(path.stem)
    if path.suffix == JOURNAL and parts is not None:
        return JOURNAL_BYTES
    if path.suffix != PART:
        return found.st_size
    if parts is not None and _data_bytes(path) <= _in_blocks(parts):
        return parts.kept_bytes
    return allocated_bytes(path)


def allocated_bytes(path: Path) -> int:
    """Return the bytes of a file that take space, up to its end."""
    found = path.stat()
    return min(found.st_size, found.st_blocks * 512)


def _in_blocks(parts: Parts) -> int:
    """Return what parts take in whole blocks of the filesystem, up to the end of the file."""
    rounded = -(-parts.kept_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    return rounded


def _data_bytes(path: Path) -> int:
    """Return the bytes of a file that are in no hole, up to its end."""
    return sum(end - start for start, end in data_ranges(path))


def _strays(cache: Path) -> list[Path]:
    """Return the files that have no place in the cache folder, and keep it for a second.

    A damaged shard that the daemon has just found moves to quarantine by two calls, and is a stray
    only between them.
    """
    strays = [path for path in cache.rglob("*") if _is_stray(path.relative_to(cache), path)]
    until_s = time.monotonic() + _MOVE_S
    while strays and time.monotonic() < until_s:
        time.sleep(0.05)
        present = [path for path in strays if path.exists()]
        strays = [path for path in present if _is_stray(path.relative_to(cache), path)]
    return strays


def _is_stray(name: Path, path: Path) -> bool:
    match name.parts:
        case ("shards" | "partial" | "quarantine" | "catalogue" | "names",) | ("catalogue", *_):
            return False
        case ("format" | "format.copy" | "pins",):
            return False
        case ("shards" | "names", bucket):
            return len(bucket) != 2
        case ("names", bucket, key, *_):
            cache = path.parents[len(name.parts) - 1]
            return not (cache / "shards" / bucket / (key + TAR)).exists()
        case ("quarantine", file) if path.suffix == TAR:
            return not is_key(Path(file).stem)  # its sidecar follows by a second call
        case ("shards", _, file) | ("quarantine", file):
            other = {TAR: SIDECAR, SIDECAR: TAR}.get(path.suffix)
            return (
                other is None or not is_key(Path(file).stem) or not path.with_suffix(other).exists()
            )
        case ("partial", "probe" | "pins"):
            return False  # comes and goes
        case ("partial", file):
            is_known = path.suffix in (PART, JOURNAL) and is_key(Path(file).stem)
            return not is_known or not path.with_suffix(PART).exists()
    return True
