"""A reader of ranges stays with the node's daemon when the file that it was granted has moved."""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.range_reads import Span, read_ranges
from shardcache.shared.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.granted_file import open_granted, read_granted
from support.programs.daemon import Daemon, PrivateHome, eventually, private_home
from support.programs.raw_session import RawSession
from support.stores.canary import Canary

PART_BYTES = 64 * 1024
BODY = random.Random(5).randbytes(12 * PART_BYTES)
STARTS = [part * PART_BYTES for part in (1, 3, 5, 7)]
LENGTH = 100


@pytest.fixture
def home() -> Iterator[PrivateHome]:
    """A place for a private daemon, which nobody should start."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-m-") as folder,
        private_home(Path(folder)) as home,
    ):
        yield home


def test_ranges_granted_ahead_outlive_the_publication_of_the_whole(
    home: PrivateHome, tmp_path: Path
) -> None:
    """Their file gets another path; the reader asks again for each, and needs no private daemon."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000")
    with Canary() as store, Daemon(tmp_path, *flags) as daemon:
        url = store.put("object.bin", BODY)
        read_ranges(daemon, [Span(url, start, start + LENGTH) for start in STARTS])
        choice = DaemonChoice(daemon.socket, may_fall_back=True)
        session = Session(choice, ReaderIdentity("job"), Patience(60.0, retry_s=10_000.0))
        (row,) = daemon.shards()
        ref = ShardRef(url, row["version"], len(BODY), is_file=True)
        session.declare(Plan.of(Manifest.of([ref]), 0, range(1), wanted="ranges"))
        spans = [(0, (start, start + LENGTH)) for start in STARTS]
        leases = session.lease_ranges(spans, needed=True)
        for lease in leases:
            session.wait(lease)

        fetch_whole(daemon, url)
        found = [read(session, lease) for lease in leases]

        assert found == [BODY[start : start + LENGTH] for start in STARTS]
        assert home.running() == []
        session.close()


def fetch_whole(daemon: Daemon, url: str) -> None:
    """Have the whole object published."""
    with RawSession(daemon, job="other") as other:
        other.plan([url], [0], wanted="files")
        other.take(0)
    eventually(lambda: daemon.whole() == [url])
    eventually(lambda: not list(daemon.cache_dir.glob("partial/*.part")))


def read(session: Session, lease: LeaseRequest) -> bytes:
    """Read a range that was granted."""
    assert lease.span is not None
    start, end = lease.span

    def request_again() -> LeaseRequest:
        (again,) = session.lease_ranges([(0, (start, end))], needed=True)
        return again

    def cut(grant: Grant) -> bytes:
        descriptor = open_granted(grant)
        try:
            return os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)

    last, data = read_granted(session, lease, request_again, cut)
    session.release(last)
    return data
