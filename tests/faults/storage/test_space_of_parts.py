"""Files of parts take as much of the disk as is counted for them, whatever was in them before."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.kill_audit import bookkeeping
from campaign.range_reads import Span, read_ranges
from shardcache.store.folder.layout import JOURNAL
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.stores.canary import Canary, GatedStore

PART_BYTES = 64 * 1024
PARTS = 6
BODY = random.Random(11).randbytes(PARTS * PART_BYTES - 10_000)
END = Span("", (PARTS - 1) * PART_BYTES, len(BODY))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with small parts, for ranges and for whole objects."""
    sizes = ("--part-size", str(PART_BYTES), "--range-part-size", str(PART_BYTES))
    with Daemon(tmp_path, *sizes, "--listing-ttl-s", "0", "--scrub-rate", "0") as running:
        yield running


def journal_bytes(daemon: Daemon) -> int:
    """Return the size of the only journal, 0 if there is none."""
    return sum(path.stat().st_size for path in daemon.cache_dir.glob(f"partial/*{JOURNAL}"))


def test_ranges_free_what_a_killed_download_had_allocated(daemon: Daemon) -> None:
    """A whole download allocates all of its space; parts read by ranges take their own."""
    with GatedStore() as store:
        url = store.put("object", BODY)
        store.let("object", PART_BYTES)
        session = RawSession(daemon)
        session.plan([url], [0], wanted="files")
        session.request("lease", position=0)
        eventually(lambda: journal_bytes(daemon) > len(url))
        title_bytes = journal_bytes(daemon)
        store.let("object", 2 * PART_BYTES)
        eventually(lambda: journal_bytes(daemon) > title_bytes)
        daemon.kill()
        store.let("object")
        daemon.start()

        assert read_ranges(daemon, [END._replace(url=url)]) == [BODY[END.start :]]
        assert list(bookkeeping(daemon, "after the range")) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_damaged_part_frees_its_space(daemon: Daemon, restarts: bool) -> None:
    """Also the last part, whose last block it fills only in part; the other parts stay."""
    with Canary() as store:
        url = store.put("object", BODY)
        spans = [END._replace(url=url), Span(url, 0, PART_BYTES)]
        assert read_ranges(daemon, spans) == [BODY[END.start :], BODY[:PART_BYTES]]
        (part_file,) = daemon.cache_dir.glob("partial/*.part")
        with part_file.open("r+b") as file:
            file.seek(END.start)
            file.write(b"damage")
        if restarts:
            daemon.restart()
        daemon.request("POST", "/v1/verify", {"prefix": ""})

        assert [row["cached_bytes"] for row in daemon.shards()] == [PART_BYTES]
        assert list(bookkeeping(daemon, "after the damage")) == []
