"""The daemon is killed (SIGKILL) at each call by which it changes a file, one life for each call, and started again.

Published shards must be intact and served without being fetched again, finished parts be used, `used_bytes` agree with
the disk, and nothing lie about that nobody counts. Readers are killed at random, with leases in hand.
"""

import gzip
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from campaign.harness import Result, Row, scaled
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR
from shardcache.store.keys import is_key
from shardcache_client.daemon.websocket import HandshakeError
from support.disks.shim import CHANGES, HAS_CC, Action, Op, Shim, read_log
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.programs.zygote import Zygote
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

PART_BYTES = 64 * 1024
FLAGS = ("--part-size", str(PART_BYTES), "--listing-ttl-s", "0", "--log-format", "json")
AMPLE = "1GB"
SHARDS = 6
SAMPLES = 10
COMPRESSED = 4  # the number of the one that is
# A start asks for every folder again; where they are all there, that changes nothing.
WITHOUT_FOLDERS = tuple(op for op in CHANGES if op is not Op.MKDIR)
WRITES = (Op.WRITE, Op.ALLOCATE)
# What a reader or a tool meets when the daemon dies under it.
GONE = (OSError, http.client.HTTPException, HandshakeError)


@dataclass(frozen=True, slots=True)
class Source:
    """Contents of the object store."""

    tars: dict[str, bytes]  # url → the plain tar that readers must get
    stored_bytes: dict[str, int]  # url → size in the store
    env: dict[str, str] = field(default_factory=dict)  # variables by which a daemon finds the store


@dataclass(frozen=True, slots=True)
class Story:
    """A daemon's story up to its kill."""

    name: str  # in the table
    source: Source  # what it fetches from
    template: Path | None  # cache folder to begin with, copied for each life; None for none at all
    tell: Callable[[Daemon, Source], None]  # does the reading and asking; it must end
    capacity: str  # of the cache while the story is told
    ops: tuple[Op, ...]  # the calls that are points to die at
    stride: int = 1  # how many calls lie from one such point to the next, where most of them are alike


@dataclass(frozen=True, slots=True)
class Death:
    """At which call the daemon dies; `again`: at which it dies once more after its restart, 0 for not.

    In the middle of a call only writes and allocations can be: then it is the `at`-th of these.
    """

    action: Action
    at: int
    again: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Remains of a crash on the disk."""

    published: frozenset[Path]  # paths of the tars that are visible
    missing_bytes: int  # what has to be fetched for the rest, finished parts taken off


class Life:
    """One run of a story in a folder of its own."""

    def __init__(self, zygote: Zygote, story: Story, root: Path) -> None:
        self._story = story
        self._zygote = zygote
        root.mkdir()
        self._root = root
        self.cache = root / "cache"
        if story.template is not None:
            shutil.copytree(story.template, self.cache)
        self.shim = Shim(root / "shim", self.cache)

    def _daemon(self, capacity: str) -> Daemon:
        env = self._story.source.env | {"SHIM_CONTROL": str(self.shim.path)}
        return Daemon(self._root, *FLAGS, capacity=capacity, env=env, spawn=self._zygote.spawn)

    def live(self, death: Death, ops: tuple[Op, ...] = ()) -> bool:
        """Tell the story until it ends or the daemon is killed; return whether it was.

        Raises what goes wrong for another reason.
        """
        ops = ops or (WRITES if death.action is Action.KILL_HALF else self._story.ops)
        self.shim.arm(death.action, at=death.at, ops=ops)
        daemon = self._daemon(self._story.capacity)
        try:
            daemon.start()
            self._story.tell(daemon, self._story.source)
        except (*GONE, RuntimeError):
            if not self.shim.acted:
                raise
        finally:
            daemon.kill()
        return bool(self.shim.acted)

    def recover(self, result: Result, how: str, *, may_fetch: bool = False) -> None:
        """Start it once more, undisturbed, and count what is not as it must be.

        Args:
            may_fetch: whether finished parts may have been lost.
        """
        self.shim.disarm()
        source = self._story.source
        found = look(self.cache, source, may_fetch=may_fetch)
        daemon = self._daemon(AMPLE)
        begun_s = time.monotonic()
        daemon.start()
        try:
            result.recovery_s.append(time.monotonic() - begun_s)
            for kind, problem in audit(daemon, source, found):
                result.fail(kind, f"{how}: {problem}")
        finally:
            daemon.kill()
        if "Traceback" in daemon.log.read_text():
            result.fail("untyped", f"{how}: a bug shows in the log: {daemon.tail()}")


def look(cache: Path, source: Source, *, may_fetch: bool = False) -> Found:
    """Return what is published in a folder that no daemon uses, and what is still to be fetched."""
    urls = {data: url for url, data in source.tars.items()}
    tars = [tar for tar in cache.glob(f"shards/*/*{TAR}") if tar.with_suffix(SIDECAR).exists()]
    published = {tar: urls[data] for tar in tars if (data := tar.read_bytes()) in urls}
    missing_bytes = sum(size for url, size in source.stored_bytes.items() if url not in published.values())
    journals = [] if may_fetch else [_read_journal(path) for path in cache.glob(f"partial/*{JOURNAL}")]
    done_bytes = sum(size for url, size in journals if url not in published.values())
    return Found(frozenset(published), missing_bytes - done_bytes)


def _read_journal(journal: Path) -> tuple[str, int]:
    """Return of which url there are parts, and how many bytes of it are finished."""
    title, _, records = journal.read_bytes().partition(b"\n")
    if not records or not (part := journal.with_suffix(PART)).exists():
        return "", 0
    about = json.loads(title)
    assert part.stat().st_size == about["size_bytes"]
    numbers = {int.from_bytes(records[at : at + 4], "little") for at in range(0, len(records) - 7, 8)}
    return about["url"], sum(min(PART_BYTES, about["size_bytes"] - number * PART_BYTES) for number in numbers)


def audit(daemon: Daemon, source: Source, found: Found) -> list[tuple[str, str]]:
    """Return what is wrong with a daemon that came back, as kinds of `Result` and words."""
    problems = list(_bookkeeping(daemon, "after the start"))
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    shards = len(daemon.shards())
    if shards != len(found.published):
        problems.append(("lost", f"{len(found.published)} shards were published, {shards} are found sound"))
    problems += _served(daemon, source)
    fetched_bytes = daemon.status()["counters"]["origin_bytes"]
    if fetched_bytes > found.missing_bytes:
        problems.append(("lost", f"{fetched_bytes} bytes were fetched, {found.missing_bytes} were missing"))
    problems += [("lost", f"{tar} was published and is gone") for tar in found.published if not tar.exists()]
    eventually(lambda: not daemon.status()["transfers"])
    return problems + list(_bookkeeping(daemon, "in the end"))


def _served(daemon: Daemon, source: Source) -> list[tuple[str, str]]:
    problems = []
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


def _size_bytes(path: Path) -> int:
    """Return what a file takes of the disk: one that was to be allocated when the daemon was killed takes nothing."""
    found = path.stat()
    return min(found.st_size, found.st_blocks * 512) if path.suffix == ".part" else found.st_size


def _bookkeeping(daemon: Daemon, when: str) -> list[tuple[str, str]]:
    """Return how what the daemon believes differs from what lies on the disk."""
    cache = daemon.cache_dir
    files = _sizes_bytes(cache)
    on_disk_bytes = sum(files.values())
    used_bytes = daemon.status()["cache"]["used_bytes"]
    problems = []
    if used_bytes != on_disk_bytes:
        names = sorted(f"{path.relative_to(cache)} {size_bytes}" for path, size_bytes in files.items())
        problems.append(("wrong", f"{when}, used_bytes is {used_bytes}, {on_disk_bytes} lie on the disk: {names}"))
    return problems + [("wrong", f"{when}, {path} lies about") for path in _strays(cache)]


def _strays(cache: Path) -> list[Path]:
    """Return the files that have no place in the cache folder, and keep it for a second.

    A damaged shard that the daemon has just found moves to quarantine by two calls, and is a stray only between them.
    """
    strays = [path for path in cache.rglob("*") if _is_stray(path.relative_to(cache), path)]
    until_s = time.monotonic() + _MOVE_S
    while strays and time.monotonic() < until_s:
        time.sleep(0.05)
        strays = [path for path in strays if path.exists() and _is_stray(path.relative_to(cache), path)]
    return strays


def _sizes_bytes(cache: Path) -> dict[Path, int]:
    """Return the sizes of all files that take space of the cache."""
    while True:
        with suppress(FileNotFoundError):  # one was moved to quarantine between the listing and this: look again
            files = [path for folder in ("shards", "partial", "quarantine") for path in (cache / folder).rglob("*.*")]
            return {path: _size_bytes(path) for path in files}


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
            return other is None or not is_key(Path(file).stem) or not path.with_suffix(other).exists()
        case ("partial", "probe" | "pins"):
            return False  # comes and goes
        case ("partial", file):
            return path.suffix not in (PART, JOURNAL) or not path.with_suffix(PART).exists() or not is_key(path.stem)
    return True


def die_and_recover(zygote: Zygote, story: Story, death: Death, root: Path, result: Result) -> None:
    """Live a story to the given death, restart, and count in the result what came of it."""
    how = f"{story.name}, {death.action.name} at {death.at}" + f" and {death.again}" * bool(death.again)
    try:
        life = Life(zygote, story, root)
        killed = life.live(death)
        if killed and death.again:
            killed = life.live(Death(Action.KILL_BEFORE, death.again))
        result.injected += killed
        life.recover(result, how)
    except TimeoutError as exn:
        result.fail("hangs", f"{how}: {exn!r}")
    except (*GONE, RuntimeError, AssertionError) as exn:
        result.fail("untyped", f"{how}: {exn!r}")
    finally:
        with suppress(OSError):
            shutil.rmtree(root)


def tar(number: int) -> bytes:
    """Return a tar of a little more than three parts."""
    return make_tar(random_samples(SAMPLES, {"bin": PART_BYTES // 3}, seed=number, first=number * SAMPLES))


def on_disk(folder: Path) -> Source:
    folder.mkdir()
    tars, stored_bytes = {}, {}
    for number in range(SHARDS):
        packed = number == COMPRESSED
        path = folder / (f"{number}.tar.gz" if packed else f"{number}.tar")
        path.write_bytes(gzip.compress(tar(number), 1) if packed else tar(number))
        tars[f"file://{path}"] = tar(number)
        stored_bytes[f"file://{path}"] = path.stat().st_size
    return Source(tars, stored_bytes)


def on_s3(server: MotoS3) -> Source:
    server.make_bucket("kills")
    tars = {server.put("kills", f"{number}.tar", tar(number)): tar(number) for number in range(3)}
    return Source(tars, {url: len(data) for url, data in tars.items()}, server.env())


def read(daemon: Daemon, urls: Sequence[str]) -> None:
    with RawSession(daemon) as session:
        session.plan(list(urls), list(range(len(urls))))
        for position in range(len(urls)):
            lease = session.take(position)
            assert lease["type"] == "leased", lease
            session.send(type="release", lease=lease["lease"])
            session.settle()


def fetch(daemon: Daemon, source: Source) -> None:
    read(daemon, list(source.tars))


def look_after(daemon: Daemon, source: Source) -> None:
    """Verify, read what was damaged again, evict a shard, count its samples."""
    urls = list(source.tars)
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    read(daemon, urls[:1])
    daemon.request("POST", "/v1/evict", {"urls": urls[1:3]})
    daemon.request("POST", "/v1/index", {"urls": urls})


def pin(daemon: Daemon, source: Source) -> None:
    urls = list(source.tars)
    daemon.request("POST", "/v1/pin", {"urls": urls})
    daemon.request("POST", "/v1/unpin", {"urls": urls[:2]})


def idle(daemon: Daemon, source: Source) -> None:
    """Do nothing but start."""


def grow(zygote: Zygote, source: Source, folder: Path, numbers: Sequence[int], *, parts: int = 0) -> Path:
    """Return a cache folder that holds some shards whole, and so many parts of the one that comes after them."""
    folder.mkdir()
    shim = Shim(folder / "shim", folder / "cache")
    env = source.env | {"SHIM_CONTROL": str(shim.path)}
    urls = list(source.tars)
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=env, spawn=zygote.spawn) as daemon:
        read(daemon, [urls[number] for number in numbers])
        if parts:
            shim.arm(Action.KILL_BEFORE, at=parts + 2, ops=(Op.WRITE,), match=".journal")
            try:
                read(daemon, urls[len(numbers) :])
            except GONE:
                assert shim.acted
    return folder / "cache"


def damaged(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder in which one bit of one shard is flipped."""
    shutil.copytree(cache, copy)
    victim = min(copy.glob("shards/*/*.tar"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o640)
    victim.write_bytes(data)
    victim.chmod(0o440)
    return copy


def older(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder without its format, as an older release left it."""
    shutil.copytree(cache, copy)
    (copy / "format").unlink()
    return copy


def stories(zygote: Zygote, server: MotoS3, folder: Path) -> dict[str, Story]:
    """Return all of them by name, their stores and templates made below `folder`."""
    local, remote = on_disk(folder / "store"), on_s3(server)
    empty = grow(zygote, local, folder / "e", ())
    half = grow(zygote, local, folder / "h", (0, 1, 2), parts=2)
    whole = grow(zygote, local, folder / "w", range(SHARDS))
    some = f"{3.6 * len(tar(0)):.0f}"  # three shards and the parts of a fourth
    told = [
        Story("first start", local, None, idle, AMPLE, CHANGES, stride=5),  # 256 folders are made
        Story("take over", local, older(whole, folder / "older"), idle, AMPLE, WITHOUT_FOLDERS),
        Story("pin", local, half, pin, AMPLE, WITHOUT_FOLDERS),
        Story("fetch", local, empty, fetch, AMPLE, WITHOUT_FOLDERS),
        Story("fetch from S3", remote, empty, fetch, AMPLE, WITHOUT_FOLDERS),
        Story("resume and evict", local, half, fetch, some, WITHOUT_FOLDERS),
        Story("verify, evict, count", local, damaged(whole, folder / "damaged"), look_after, AMPLE, WITHOUT_FOLDERS),
    ]
    return {story.name: story for story in told}


@dataclass(frozen=True, slots=True)
class Ground:
    """Stories, and a folder for their lives."""

    zygote: Zygote
    stories: dict[str, Story]
    folder: Path


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    """Prepare the stories."""
    with MotoS3() as server, Zygote() as zygote:
        yield Ground(zygote, stories(zygote, server, folder), folder)


NEEDS_CC = "" if HAS_CC else "the shim needs a C compiler"


_AT_ONCE = 3
_MOVE_S = 1.0  # longer than the daemon takes to move a shard to quarantine
_READERS_AT_ONCE = 4
_READER = """
import random, sys, zlib
from pathlib import Path
from support.programs.raw_session import RawSession

rng = random.Random(sys.argv[2])
with RawSession(Path(sys.argv[1]), job="mortal") as session:
    reads = [rng.randrange(len(sys.argv) - 3) for _ in range(100_000)]
    session.plan(sys.argv[3:], reads)
    held = []
    for position, number in enumerate(reads):
        held.append((number, session.take(position)))
        if len(held) > rng.randrange(1, 4):
            number, lease = held.pop(rng.randrange(len(held)))
            print(number, zlib.crc32(Path(lease["path"]).read_bytes()), flush=True)
            session.send(type="release", lease=lease["lease"])
"""


def killed(name: str, field: Ground, result: Result, scale: float) -> None:
    """Kill a daemon before each of its calls at scale 1, at every n-th below, and in the middle of each write."""
    story = field.stories[name]
    with tempfile.TemporaryDirectory(dir=field.folder) as folder:
        life = Life(field.zygote, story, Path(folder, "count"))
        life.shim.log_to(Path(folder, "log"))
        life.live(Death(Action.COUNT, 0))
        writes = sum(call.op in WRITES for call in read_log(Path(folder, "log")))
    step = round(story.stride / scale)
    _kill(field, story, result, [Death(Action.KILL_BEFORE, at) for at in _points(life.shim.seen, step)])
    _kill(field, story, result, [Death(Action.KILL_HALF, at) for at in _points(writes, step)])


def _points(count: int, step: int) -> range:
    """Return every so many-th of as many points, or the one in the middle where they are fewer."""
    return range(1, count + 1, step) if step < count else range(count // 2, count // 2 + 1)


def killed_twice(field: Ground, result: Result, scale: float) -> None:
    """Kill a daemon, and the next one while it recovers."""
    rng = random.Random(0)
    count = scaled(120, scale)
    deaths = [Death(Action.KILL_AFTER, rng.randrange(60, 300), rng.randrange(1, 200)) for _ in range(count)]
    _kill(field, field.stories["fetch"], result, deaths)


def _kill(field: Ground, story: Story, result: Result, deaths: list[Death]) -> None:
    with tempfile.TemporaryDirectory(dir=field.folder) as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        live: Callable[[Death, Path], None] = partial(_live, field, story, result)
        list(pool.map(live, deaths, (Path(folder, str(number)) for number in range(len(deaths)))))


def _live(field: Ground, story: Story, result: Result, death: Death, root: Path) -> None:
    die_and_recover(field.zygote, story, death, root, result)


def killed_readers(freeze: bool, field: Ground, result: Result, scale: float) -> None:
    """Kill readers, a few at a time; their sessions, leases and plans must end with them.

    Args:
        freeze: stop all of them before, and let all but one go on.
    """
    source, rng = field.stories["fetch"].source, random.Random(0)
    folder = Path(tempfile.mkdtemp(dir=field.folder))
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=source.env, spawn=field.zygote.spawn) as daemon:
        while result.injected < scaled(200, scale):
            readers = [_start_reader(daemon, source, rng.random()) for _ in range(_READERS_AT_ONCE)]
            for reader in readers:
                _hear(reader, source, rng.randrange(1, 100), result)
            rng.shuffle(readers)
            if freeze:
                _freeze(readers, daemon, source, result)
            for reader in readers:
                reader.kill()
                result.injected += 1
            begun_s = time.monotonic()
            for reader in readers:
                reader.communicate()
            try:
                eventually(lambda: daemon.sessions() == 0 and daemon.leases() == 0)
                result.recovery_s.append(time.monotonic() - begun_s)
            except TimeoutError:
                result.fail("hangs", f"leases outlive their readers: {daemon.status()['jobs']}")
        if "Traceback" in daemon.log.read_text():
            result.fail("untyped", f"a bug shows in the log: {daemon.tail()}")


def _hear(reader: subprocess.Popen[bytes], source: Source, count: int, result: Result) -> None:
    """Have a reader read so many shards, and compare them."""
    sums = [zlib.crc32(tar) for tar in source.tars.values()]
    for _ in range(count):
        assert reader.stdout is not None
        number, found = map(int, reader.stdout.readline().split())
        if found != sums[number]:
            result.fail("wrong", f"a reader got other bytes for shard {number}")


def _freeze(readers: list[subprocess.Popen[bytes]], daemon: Daemon, source: Source, result: Result) -> None:
    """Stop readers, read everything meanwhile, and let all but the first go on with what they hold."""
    for reader in readers:
        reader.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
    fetch(daemon, source)
    if daemon.leases() < len(readers):
        result.fail("lost", f"stopped readers have lost their leases: {daemon.shards()}")
    for reader in readers[1:]:
        assert reader.stdout is not None
        os.set_blocking(reader.stdout.fileno(), False)
        reader.stdout.read()  # what it had printed before
        os.set_blocking(reader.stdout.fileno(), True)
        reader.send_signal(signal.SIGCONT)
        _hear(reader, source, 20, result)


def _start_reader(daemon: Daemon, source: Source, seed: float) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = (sys.executable, "-c", _READER, str(daemon.socket), str(seed), *source.tars)
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


_STORIES = ("first start", "take over", "pin", "fetch", "fetch from S3", "resume and evict", "verify, evict, count")
ROWS = (
    *(Row(f"SIGKILL: {name}", partial(killed, name), skip=NEEDS_CC) for name in _STORIES),
    Row("SIGKILL, and again while it recovers", killed_twice, skip=NEEDS_CC),
    Row("SIGKILL: readers with leases", partial(killed_readers, False), skip=NEEDS_CC),
    Row("SIGSTOP: readers with leases, killed as they are or later", partial(killed_readers, True), skip=NEEDS_CC),
)
