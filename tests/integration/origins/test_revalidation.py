"""Cached shards with versions checked long ago, before stores that answer late or never."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem, register_implementation

from shardcache.cache.planner import Planner
from shardcache.cache.versions import revalidation
from shardcache.cache.versions.revalidation import Revalidation
from shardcache.errors import NotFoundError, OriginUnavailableError
from shardcache.origin.registry import Origins
from shardcache.shared.protocol import ShardRef
from shardcache.store.keys import shard_key
from shardcache.telemetry.metrics import Counters
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.stores import open_store, publish
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

SHARDS = 12


@pytest.fixture
def proxy(moto: Bucket) -> Iterator[FaultyProxy]:
    """A gate in front of the origin."""
    with FaultyProxy(moto.env()["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


def shard(seed: int) -> bytes:
    """Return one edition of a shard."""
    return make_tar(random_samples(2, seed=seed))


def read(session: RawSession, position: int) -> bytes:
    """Lease a shard, read it and give it back."""
    granted = session.take(position)
    body = Path(granted["path"]).read_bytes()
    session.send(type="release", lease=granted["lease"])
    return body


@pytest.mark.slow
def test_a_store_that_hangs_holds_back_no_cached_shard(
    moto: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """All cached shards are served while the store hangs and gets one question at a time.

    Once it is well, a shard that was replaced meanwhile is read in its new version.
    """
    urls = [moto.put(f"{number}.tar", shard(0)) for number in range(SHARDS)]
    order = list(range(SHARDS))
    env = proxy.env(moto.env())
    with Daemon(tmp_path, "--listing-ttl-s", "0", env=env) as daemon, RawSession(daemon) as session:
        session.plan(urls, order)
        assert {read(session, position) for position in order} == {shard(0)}
        proxy.fail(Mischief.HEAD_SILENCE)
        moto.put("0.tar", shard(1))
        assert {read(session, position) for position in order} == {shard(0)}
        assert 0 < proxy.done[Mischief.HEAD_SILENCE] < SHARDS
        proxy.heal()
        eventually(lambda: read(session, 0) == shard(1))
        assert read(session, 1) == shard(0)


class Asking:
    """Revalidation of one cached shard of a store that misbehaves."""

    def __init__(
        self, root: Path, faulty: FaultyS3, origins: Origins, group: asyncio.TaskGroup
    ) -> None:
        self._store = open_store(root)
        self._root = root
        self.names = Planner(self._store.shards)
        self.faulty = faulty
        self.revalidation = Revalidation(self._store, origins, self.names, Counters(), group, 0.0)
        self.url = faulty.put("a.tar", shard(0))

    async def publish(self, version: str) -> None:
        """Have the shard in the cache, in a version."""
        await publish(self._store, self.url, version=version)
        self.names.learn(self.url, shard_key(self.url, version), float("-inf"))

    async def check(self) -> str:
        """Check it as a lease does, and return the key that would be served."""
        await self.revalidation.check(self.url, ShardRef(self.url))
        return self.names.key(self.url)

    @property
    def heads(self) -> int:
        """Number of questions to the origin."""
        return sum(method == "HEAD" for method, *_ in self.faulty.seen)


@pytest.fixture
async def asking(tmp_path: Path, faulty: FaultyS3, origins: Origins) -> AsyncIterator[Asking]:
    """A cached shard in the store's version."""
    async with asyncio.TaskGroup() as group:
        found = Asking(tmp_path, faulty, origins, group)
        obj = await origins.origin(found.url).stat(found.url)
        await found.publish(obj.version)
        faulty.seen.clear()
        yield found
        found.revalidation.stop()


async def test_one_revalidation_serves_all_readers_of_a_shard(asking: Asking) -> None:
    """Readers that come together ask once, and each again when the answer is old."""
    assert len(set(await asyncio.gather(*(asking.check() for _ in range(20))))) == 1
    assert asking.heads == 1
    await asking.check()
    assert asking.heads == 2


async def test_a_prompt_answer_counts_at_once(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that was replaced, or is gone, is noticed by the very lease that asks."""
    monkeypatch.setattr(revalidation, "_GRACE_S", GUARD_S)  # what is prompt depends on the machine
    monkeypatch.setattr(revalidation, "_TIMEOUT_S", GUARD_S)
    former = await asking.check()
    asking.faulty.put("a.tar", shard(1))
    assert await asking.check() != former
    await asking.publish("another")
    del asking.faulty.objects["a.tar"]
    with pytest.raises(NotFoundError):
        await asking.check()


@pytest.mark.slow
async def test_a_late_answer_counts_from_the_next_lease_on(asking: Asking) -> None:
    """A lease during the check gets the cached version without a question of its own."""
    former = asking.names.key(asking.url)
    asking.faulty.hold("a.tar", method="HEAD", times=10)
    asking.faulty.put("a.tar", shard(1))
    for _ in range(5):
        assert await asking.check() == former
    assert len(asking.revalidation.pending) == 1
    asking.faulty.answer_late()
    await asyncio.gather(*asking.revalidation.pending.values())
    assert asking.names.key(asking.url) != former


@pytest.mark.slow
async def test_an_answer_older_than_a_transfers_is_not_believed(asking: Asking) -> None:
    """Facts that a transfer learned while a question was under way stay."""
    asking.faulty.hold("a.tar", method="HEAD", times=10)
    await asking.check()
    asking.names.learn(asking.url, "newer", asyncio.get_running_loop().time())
    asking.faulty.answer_late()
    await asyncio.gather(*asking.revalidation.pending.values())
    assert asking.names.key(asking.url) == "newer"


@pytest.mark.slow
def test_credentials_that_expire_end_no_daemon(moto: Bucket, tmp_path: Path) -> None:
    """A cached shard is served and another refused while only expired credentials come."""
    issued = tmp_path / "issued.json"
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {issued}\n")
    env = moto.env() | {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_CONFIG_FILE": str(config),
    }
    urls = [moto.put(f"{number}.tar", shard(number)) for number in range(2)]
    issue(issued, timedelta(minutes=5))
    flags = ("--listing-ttl-s", "0", "--attempts", "1")
    with Daemon(tmp_path, *flags, env=env) as daemon, RawSession(daemon) as session:
        session.plan(urls, [0, 0])
        assert read(session, 0) == shard(0)
        issue(issued, timedelta(minutes=-5))
        assert read(session, 1) == shard(0)
        session.plan(urls, [1])
        error = session.ask("lease", position=0)["error"]
        assert error["code"] == OriginUnavailableError.code
        assert error["url"] == urls[1]
        assert "renew" in error["remedy"]


def issue(path: Path, valid_for: timedelta) -> None:
    """Write what a credential process prints; the SDK soon asks for new credentials."""
    ends = (datetime.now(UTC) + valid_for).isoformat()
    key = {
        "Version": 1,
        "AccessKeyId": "id",
        "SecretAccessKey": "secret",
        "SessionToken": "token",
        "Expiration": ends,
    }
    path.write_text(json.dumps(key))


class OddFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Raises what no file system is expected to raise."""

    protocol = "odd"

    def info(self, path: str, **_options: object) -> dict[str, object]:
        """Raise an error of no file system."""
        raise LookupError(path)


@pytest.mark.slow
async def test_unexpected_error_ends_no_daemon(asking: Asking) -> None:
    """The cached version is served and other tasks go on, whatever a filesystem raises."""
    register_implementation("odd", OddFileSystem, clobber=True)
    asking.url = "odd://host/a.tar"
    await asking.publish("1")
    assert await asking.check() == shard_key(asking.url, "1")
