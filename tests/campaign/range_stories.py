"""Stories of daemons that fetch, keep and lose parts of objects, for readers of ranges."""

import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from campaign.kill_audit import Source
from campaign.kill_stories import grow, idle, on_s3, read, tar
from campaign.lives import AMPLE, FLAGS, OWN, PART_BYTES, Story, copy_folder
from campaign.range_reads import Span, read_ranges
from shardcache.store.folder.layout import JOURNAL, PART
from support.programs.daemon import Daemon
from support.programs.zygote import Zygote
from support.stores.buckets import MotoS3
from support.stores.canary import Canary

Tell = Callable[[Daemon, Source], None]

OBJECTS = 3
PARTS = 8
_SAMPLES = 22  # of a tar of so many parts
_FEW = 5 * PART_BYTES  # of all objects' parts
_HALF = PART_BYTES // 2
_DROPPED = 1 << 31
_LONG_JOURNAL_BYTES = 6000  # a journal of outdated records that is longer is written anew


def _tars() -> list[bytes]:
    return [tar(number, _SAMPLES) for number in range(OBJECTS)]


def _on_web(server: Canary) -> Source:
    tars = {server.put(f"{number}.tar", data): data for number, data in enumerate(_tars())}
    return Source(tars, {url: len(data) for url, data in tars.items()})


def part(url: str, number: int, count: int = 1) -> Span:
    """Return the range of consecutive parts."""
    return Span(url, number * PART_BYTES, (number + count) * PART_BYTES)


def _some(urls: Sequence[str]) -> list[Span]:
    """Return single parts, neighbours, pieces of parts and the ends of objects, in no order."""
    spans = [part(url, number) for number in (5, 1) for url in urls]
    spans += [Span(url, 2 * PART_BYTES + _HALF, 4 * PART_BYTES - _HALF) for url in urls]
    spans += [Span(urls[0], 7 * PART_BYTES, 7 * PART_BYTES + 10), part(urls[0], 0, 2)]
    return spans


def _read_right(daemon: Daemon, source: Source, spans: Sequence[Span], *, notes: bool) -> None:
    found = read_ranges(daemon, spans, notes=notes)
    for span, data in zip(spans, found, strict=True):
        assert data == source.tars[span.url][span.start : span.end], f"{span} has other bytes"


def read_some(daemon: Daemon, source: Source) -> None:
    """Read ranges in a cache that has space for all: what was granted stays."""
    _read_right(daemon, source, _some(list(source.tars)), notes=True)


def read_all_twice(daemon: Daemon, source: Source) -> None:
    """Read all parts of all objects, none of which is still cached when it is read again."""
    spans = [part(url, number) for number in reversed(range(PARTS)) for url in source.tars]
    _read_right(daemon, source, spans + spans[:6], notes=False)


def read_then_whole(daemon: Daemon, source: Source) -> None:
    """Read ranges, then whole objects, which have their parts from there."""
    urls = list(source.tars)
    _read_right(
        daemon, source, [part(url, number) for number in (5, 1) for url in urls], notes=True
    )
    read(daemon, urls[:2])


def look_after(daemon: Daemon, source: Source) -> None:
    """Verify, read what was damaged again, evict an object."""
    urls = list(source.tars)
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    _read_right(daemon, source, _some(urls), notes=False)
    daemon.request("POST", "/v1/evict", {"urls": urls[1:]})


def _editions() -> tuple[bytes, ...]:
    """Return the contents of an object that is replaced, each of another size."""
    return tuple(tar(100 + edition, _SAMPLES - edition) for edition in range(3))


def read_replaced(server: Canary, daemon: Daemon, source: Source) -> None:
    """Read ranges of an object of this life alone, which is replaced in between."""
    for edition, data in enumerate(_editions()):
        url = server.put(f"{uuid.uuid5(uuid.NAMESPACE_URL, str(daemon.root))}.tar", data)
        (daemon.root / OWN).write_bytes(url.encode() + b"\n" + data)
        for span in (part(url, 4), part(url, 1), part(url, 6)):
            (found,) = read_ranges(daemon, [span])
            assert found == data[span.start : span.end], f"{span} of edition {edition}"


def _grown(zygote: Zygote, source: Source, folder: Path) -> Path:
    """Return a cache folder with some parts of all objects."""
    folder.mkdir()
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=source.env, spawn=zygote.spawn) as daemon:
        read_ranges(daemon, _some(list(source.tars)))
    return folder / "cache"


def _damaged(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder in which one bit of a cached part is flipped."""
    copy_folder(cache, copy)
    victim = min(copy.glob(f"partial/*{PART}"))
    with victim.open("r+b") as file:
        file.seek(5 * PART_BYTES + _HALF)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return copy


def _long(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder whose journals tell of much that came and went."""
    copy_folder(cache, copy)
    for journal in copy.glob(f"partial/*{JOURNAL}"):
        part_number = (PARTS - 2).to_bytes(4, "little")
        dropped = (_DROPPED | (PARTS - 2)).to_bytes(4, "little")
        pair = part_number + bytes(4) + dropped + bytes(4)
        with journal.open("ab") as file:
            file.write(pair * (_LONG_JOURNAL_BYTES // len(pair)))
    return copy


def stories(zygote: Zygote, s3: MotoS3, web: Canary, folder: Path) -> list[Story]:
    """Return all of them, their stores and templates made below `folder`."""
    local = _on_web(web)
    remote = on_s3(s3, "ranges", _tars())
    empty = grow(zygote, local, folder / "re", ())
    half = grow(zygote, local, folder / "rh", (), parts=3)
    some = _grown(zygote, local, folder / "rs")
    told: list[tuple[str, Source, Path, Tell, str]] = [
        ("ranges", local, empty, read_some, AMPLE),
        ("ranges from S3", remote, empty, read_some, AMPLE),
        ("ranges, taken over", local, some, idle, AMPLE),
        ("ranges of a shard half fetched", local, half, read_some, AMPLE),
        ("ranges, then the whole", local, some, read_then_whole, AMPLE),
        ("ranges, evicted", local, _long(some, folder / "long"), read_all_twice, str(_FEW)),
        ("ranges of a replaced object", local, some, partial(read_replaced, web), AMPLE),
    ]
    found = [
        Story(*each, is_of_ranges=True, samples=_SAMPLES, editions=_editions()) for each in told
    ]
    spoilt = _damaged(some, folder / "spoilt")
    found.append(
        Story(
            "ranges, verified and evicted",
            local,
            spoilt,
            look_after,
            AMPLE,
            is_of_ranges=True,
            spoilt=1,
            samples=_SAMPLES,
        )
    )
    return found
