"""A session leaves the node's daemon for a private one and returns, without lost samples."""

import errno
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache.errors import (
    AccessDeniedError,
    CacheDirError,
    DiskFullError,
    NotAllowedError,
    NotFoundError,
    ShardcacheError,
    VersionMismatchError,
)
from shardcache.shared.protocol import ShardRef
from shardcache.shared.unix_socket import health
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.shard_window import ShardWindow
from support.disks.shim import CHANGES, FOR_EVER, HAS_CC, Action, Shim
from support.network.peer import Peer, arriving, refused, scripted
from support.programs.daemon import Daemon, PrivateHome, eventually, private_home
from support.programs.guard import GUARD_S
from support.shards.tars import write_shards

SHARDS = 8
SAMPLES = 5
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
FOREVER_S = 10_000.0


@pytest.fixture(scope="module", autouse=True)
def home() -> Iterator[PrivateHome]:
    """One place for the private daemon of all tests here: it starts once."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-p-") as folder,
        private_home(Path(folder)) as home,
    ):
        yield home


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Eight local shards of five samples each, one after another."""
    paths = write_shards(tmp_path, SHARDS, SAMPLES)
    return Plan.of(Manifest.of(ShardRef(f"file://{path}") for path in paths), 0, range(SHARDS))


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="shardcache-fall-") as folder:
        yield Path(folder)


def session(socket: Path, *, grace_s: float = 0.0, retry_s: float = FOREVER_S) -> Session:
    """A session that waits for no daemon of the node, and by itself asks none again."""
    patience = Patience(60.0, grace_s=grace_s, retry_s=retry_s)
    return Session(
        DaemonChoice(socket, may_fall_back=True),
        ReaderIdentity("job"),
        patience,
        partial_reads=True,
    )


def keys(shard_source: Session, plan: Plan, shards_in_hand: int = 1) -> Iterator[str]:
    """Read a plan as a dataset does: one shard asked for ahead, each in hand for a while."""
    shard_source.declare(plan)
    window = ShardWindow(shard_source, plan, partial=None)
    held = []
    try:
        for _ in range(plan.reads):
            held.append(window.take(0, SAMPLES, (0, None)))
            held[-1].open()
            window.ask(1)
            yield from (sample["__key__"] for sample in held[-1].samples())
            if len(held) == shards_in_hand:
                window.give_back(held.pop(0))
    finally:
        window.empty()
        shard_source.close()


@pytest.mark.parametrize("shards_in_hand", [1, 3])
@pytest.mark.slow
def test_reading_goes_on_and_returns(root: Path, plan: Plan, shards_in_hand: int) -> None:
    """A daemon dies in each of two shards and returns: samples come once, and it lends again."""
    with Daemon(root) as daemon:
        shard_source = session(daemon.socket, retry_s=0.0)
        read = []
        for key in keys(shard_source, plan, shards_in_hand):
            read.append(key)
            if key == "000022":
                # On the shard in hand, the first that it was asked for again.
                eventually(lambda: daemon.leases() > 0)
            if key in ("000007", "000022"):
                daemon.kill()
            if key == "000014":
                daemon.start()
        assert read == KEYS


@pytest.mark.slow
def test_bad_disk_is_avoided_with_one_warning(
    root: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards that a daemon cannot keep come from the origin, and it is asked again later."""
    socket = root / "s.sock"

    def script(peer: Peer) -> None:
        peer.begin()
        refused(DiskFullError("no room left"))(peer)
        peer.stay()

    with scripted(socket, script) as heard:
        assert list(keys(session(socket), plan)) == KEYS
    assert [message["type"] for message in heard].count("lease") == 1
    (warning,) = [
        record.getMessage() for record in caplog.records if "no room left" in record.getMessage()
    ]
    assert warning == "no room left; reading through a private daemon until the node's recovers"


def test_shard_that_was_arriving_is_read_to_its_end(root: Path, plan: Plan) -> None:
    """The daemon dies while a shard arrives, whose other samples follow, once each."""
    folder = plan.shards[0].url.rpartition("/")[0]
    shards = tuple(resolve(DaemonChoice(None), ReaderIdentity("job"), [f"{folder}/"], GUARD_S))
    path = Path(shards[0].url.removeprefix("file://"))

    def script(peer: Peer) -> None:
        peer.begin()
        place = {"url": shards[0].url, "version": shards[0].version, "path": str(path)}
        arriving(1, ready_bytes=5 * 1024, size_bytes=path.stat().st_size, **place)(peer)
        while peer.hear()["type"] != "more":
            pass

    with scripted(root / "s.sock", script) as heard:
        read = list(keys(session(root / "s.sock"), Plan.of(Manifest.of(shards), 0, range(SHARDS))))
        assert read == KEYS
    assert heard[-1]["type"] == "more"
    assert heard[-1]["beyond"] >= 5 * 1024


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CC, reason="needs a C compiler")
def test_bad_disk_is_used_again_once_it_is_well(root: Path, plan: Plan) -> None:
    """Samples come through the private daemon while the disk fails, then from the node's."""
    shim = Shim(root / "shim", root=root / "cache")
    with Daemon(root, env=shim.env()) as daemon:
        shim.arm(Action.FAIL, times=FOR_EVER, ops=CHANGES, error=errno.EIO)
        samples = keys(session(daemon.socket, retry_s=0.0), plan)
        read = list(itertools.islice(samples, 2 * SAMPLES))
        assert not daemon.shards()
        shim.disarm()
        eventually(lambda: health(daemon.socket, GUARD_S)["status"] == "ok")
        assert read + list(samples) == KEYS
        daemon.await_publication()
        assert daemon.shards()


def other_release(peer: Peer) -> None:
    """A daemon of another release."""
    peer.hear()
    peer.say(
        type="error", error=VersionMismatchError("the daemon speaks another version").to_json()
    )


def far_away(peer: Peer, **paths: str) -> None:
    """A daemon whose cache folder this process does not see."""
    peer.begin()
    for lease in itertools.count(1):
        message = peer.hear()
        while message["type"] != "lease":
            message = peer.hear()
        peer.lend(message["id"], lease, url="file:///nowhere.tar", samples=SAMPLES, **paths)


def damaged(peer: Peer) -> None:
    """A daemon whose files are no longer what they were."""
    far_away(peer, path="/dev/null", index_path="/dev/null")


def silent(peer: Peer) -> None:
    """A daemon that takes a plan and says nothing more."""
    peer.begin()
    peer.stay()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (other_release, "another version"),
        (far_away, "cannot read the daemon's files"),
        (damaged, "cannot read the daemon's files"),
        pytest.param(silent, "has not answered", marks=pytest.mark.slow),
    ],
)
def test_useless_daemon_is_left_and_named(
    root: Path,
    plan: Plan,
    script: Callable[[Peer], None],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another release, a missing mount, damaged files or a frozen process is read past."""
    socket = root / "s.sock"
    with scripted(socket, script):
        assert list(keys(session(socket, grace_s=0.5), plan)) == KEYS
    assert why in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        NotAllowedError("not for you"),
        NotFoundError("no such object"),
        AccessDeniedError("who are you"),
    ],
)
def test_errors_of_the_origin_do_not_lead_to_the_fallback(
    root: Path, plan: Plan, error: ShardcacheError
) -> None:
    """A refusal or an error of the store reaches the reader as it is, without a detour."""
    socket = root / "s.sock"

    def script(peer: Peer) -> None:
        peer.begin()
        refused(error)(peer)
        peer.stay()

    with scripted(socket, script), pytest.raises(type(error), match=error.message):
        list(keys(session(socket), plan))


@pytest.mark.slow
def test_refusal_of_a_daemon_that_came_back_is_obeyed(root: Path, plan: Plan) -> None:
    """A daemon that comes back with its own --allow ends the detour, and is not read past."""
    with Daemon(root) as lax:
        samples = keys(session(lax.socket, retry_s=0.0), plan)
        assert [next(samples) for _ in range(SAMPLES)] == KEYS[:SAMPLES]
    with Daemon(root, "--allow", "s3://elsewhere/"), pytest.raises(NotAllowedError):
        list(samples)


@pytest.mark.slow
def test_error_of_the_private_daemon_is_raised_if_both_fail(
    root: Path, plan: Plan, home: PrivateHome
) -> None:
    """A place for the cache is missing, too, and the error is about the place."""
    home.kill()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCACHE_CACHE_DIR", "/proc/nowhere")
        with pytest.raises(CacheDirError, match="/proc/nowhere"):
            list(keys(session(root / "s.sock"), plan))
