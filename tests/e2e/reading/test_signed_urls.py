"""Signed urls: all signatures of an object are one shard, for those with an accepted one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest

from shardcache.errors import AccessDeniedError, OriginError, ShardcacheError
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import open_cached
from support.network.http_requests import Request
from support.network.scripted_server import Reply, answer
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket
from support.stores.canary import GatedStore

SAMPLES = 4


class SigningServer(GatedStore):
    """A web server of private files, with the signatures that it accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: set[str] = set()

    def reply(self, head: str, number: int) -> Reply:
        query = parse_qs(urlsplit(Request.parse(head).target).query)
        (signature,) = query.get("X-Amz-Signature", [""])
        if signature in self.accepted:
            return super().reply(head, number)
        return Reply(answer(b"<Error><Code>AccessDenied</Code></Error>", status="403 Forbidden"))

    def signed(
        self, name: str, signature: str, *, at: datetime | None = None, valid_s: int = 3600
    ) -> str:
        """Return the url of a file with a signature."""
        date = f"{at or datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        valid = f"X-Amz-Date={date}&X-Amz-Expires={valid_s}"
        return self.url(f"/{name}?X-Amz-Credential=K&{valid}&X-Amz-Signature={signature}")

    def asked(self, signature: str) -> int:
        """Return the number of requests with a signature."""
        return sum(path.endswith(f"X-Amz-Signature={signature}") for path in self.paths)


@pytest.fixture
def server() -> Iterator[SigningServer]:
    """A server of one shard, which accepts two signatures."""
    with SigningServer() as server:
        server.put("a.tar", make_tar(random_samples(SAMPLES, {"jpg": 5000})))
        server.let("a.tar")
        server.accepted |= {"first", "second"}
        yield server


def read(url: str, daemon: Daemon) -> list[str]:
    """Return the keys of a dataset's samples."""
    return keys_of(ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S))


def read_range(url: str, daemon: Daemon) -> bytes:
    """Return the first bytes of a file."""
    with fsspec.open(f"shardcache::{url}", shardcache={"socket": str(daemon.socket)}) as file:
        return bytes(file.read(512))


def read_file(url: str, daemon: Daemon) -> bytes:
    """Return a file's bytes."""
    with open_cached(url, socket=daemon.socket, timeout_s=GUARD_S) as file:
        return bytes(file.read())


def read_by_number(url: str, daemon: Daemon) -> list[str]:
    """Return the keys of a dataset's samples, read by number."""
    with ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S).indexed() as samples:
        return keys_of(samples)


@pytest.mark.slow
def test_fresh_signatures_find_the_cached_shard_and_states_stay_valid(
    seaweedfs: Bucket, tmp_path: Path
) -> None:
    """An epoch and the next go on with newly signed urls, and each byte is fetched once."""
    shards = {
        f"{number}.tar": make_tar(random_samples(SAMPLES, first=number * SAMPLES))
        for number in range(3)
    }
    for name, body in shards.items():
        seaweedfs.put(name, body)

    def signed(expires_s: int) -> list[str]:
        sign = seaweedfs.server.client.generate_presigned_url
        params = [{"Bucket": seaweedfs.name, "Key": name} for name in shards]
        return [sign("get_object", Params=each, ExpiresIn=expires_s) for each in params]

    with Daemon(tmp_path) as daemon:
        options = {"shuffle": True, "seed": 1, "socket": daemon.socket, "timeout_s": GUARD_S}
        keys_of(ShardDataset(signed(999), **options))  # which counts the samples
        daemon.await_publication()
        whole = keys_of(ShardDataset(signed(1000), **options))
        begun = ShardDataset(signed(1001), **options)
        with closing(iter(begun)) as samples:
            first = keys_of(islice(samples, SAMPLES + 1))
        resumed = ShardDataset(signed(1002), **options)
        resumed.load_state_dict(begun.state_dict())
        assert first + keys_of(resumed) == whole
        assert daemon.status()["counters"]["origin_bytes"] == sum(map(len, shards.values()))


@pytest.mark.parametrize("reading", [read, read_file, read_range, read_by_number])
def test_cached_bytes_are_for_accepted_signatures_alone(
    reading: Callable[[str, Daemon], object], server: SigningServer, daemon: Daemon
) -> None:
    """A forged or missing signature does not get them, while another accepted one does."""
    read(server.signed("a.tar", "first"), daemon)
    expected = reading(server.signed("a.tar", "first"), daemon)
    for url in (server.signed("a.tar", "forged"), server.url("/a.tar")):
        with pytest.raises(AccessDeniedError):
            reading(url, daemon)
    before_bytes = daemon.status()["counters"]["origin_bytes"]
    assert reading(server.signed("a.tar", "second"), daemon) == expected
    assert daemon.status()["counters"]["origin_bytes"] == before_bytes


def test_server_is_asked_once_for_a_while(server: SigningServer, daemon: Daemon) -> None:
    """One request finds a fresh signature accepted; who comes back with it causes none."""
    url = server.signed("a.tar", "second")
    read(server.signed("a.tar", "first"), daemon)
    read(url, daemon)
    assert server.asked("second") == 1
    read(url, daemon)
    read_file(url, daemon)
    assert server.asked("second") == 1


def test_objects_of_one_version_and_two_lengths_are_not_mixed(
    server: SigningServer, daemon: Daemon
) -> None:
    """An ETag that does not tell objects apart is an error, not the bytes of the first."""
    server.etag = '"always"'
    read(server.signed("a.tar", "first"), daemon)
    daemon.await_publication()
    server.put("a.tar", make_tar(random_samples(SAMPLES + 10)))
    for _ in range(2):
        with pytest.raises(OriginError, match="by another signature"):
            read(server.signed("a.tar", "second"), daemon)


def test_forged_signature_joins_no_transfer(server: SigningServer, daemon: Daemon) -> None:
    """While the shard arrives for another reader, whose bytes it would share."""
    server.put("b.tar", make_tar(random_samples(SAMPLES)))
    server.let("b.tar", 1)  # the server says which version it is, and no more
    found: list[str] = []
    reader = threading.Thread(
        target=lambda: found.extend(read(server.signed("b.tar", "first"), daemon))
    )
    reader.start()
    eventually(lambda: bool(daemon.status()["transfers"]))
    with pytest.raises(AccessDeniedError):
        read(server.signed("b.tar", "forged"), daemon)
    server.let("b.tar")
    reader.join(GUARD_S)
    assert len(found) == SAMPLES


def test_expired_signature_says_to_sign_again(server: SigningServer, daemon: Daemon) -> None:
    """Though the shard is cached, and was read by this very url when it was valid."""
    now = datetime.now(UTC)
    short = server.signed("a.tar", "first", at=now, valid_s=2)
    read(short, daemon)
    eventually(lambda: time.time() > now.timestamp() + 2)
    server.accepted.remove("first")
    with pytest.raises(AccessDeniedError, match="the signature of the url expired at") as caught:
        read(short, daemon)
    assert "sign it again" in str(caught.value)


@pytest.mark.slow
def test_signature_that_is_refused_later_is_refused_from_then_on(
    server: SigningServer, tmp_path: Path
) -> None:
    """Once the server has been asked again, as for a new version."""
    url = server.signed("a.tar", "first")
    with Daemon(tmp_path, "--listing-ttl-s", "0") as daemon:
        read(url, daemon)
        daemon.await_publication()
        server.accepted.clear()
        with pytest.raises(ShardcacheError, match="403"):
            read(url, daemon)
