"""The daemon is killed (SIGKILL) at each call by which it changes a file, one life for each call.

It is started again after each: published shards must be intact and served without being fetched
again, finished parts be used, `used_bytes` agree with the disk, and nothing lie about that nobody
counts. What readers of ranges were granted must still be there, if it was not evicted. Readers are
killed at random, with leases in hand.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from campaign import kill_stories, range_stories
from campaign.harness import Result, Row, scaled
from campaign.killed_readers import killed_readers
from campaign.lives import NEEDS_CC, WRITES, Death, Ground, Life, Story, die_and_recover
from support.disks.shim import Action, read_log
from support.programs.zygote import Zygote
from support.stores.buckets import MotoS3
from support.stores.canary import Canary

_AT_ONCE = 3


@contextmanager
def told(zygote: Zygote, s3: MotoS3, folder: Path) -> Iterator[Ground]:
    """Prepare all stories, their templates made below `folder`."""
    with Canary() as web:
        found = kill_stories.stories(zygote, s3, folder)
        found += range_stories.stories(zygote, s3, web, folder)
        yield Ground(zygote, {story.name: story for story in found}, folder)


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    """Prepare all that the stories need."""
    with MotoS3() as s3, Zygote() as zygote, told(zygote, s3, folder) as field:
        yield field


def killed(name: str, field: Ground, result: Result, scale: float) -> None:
    """Kill a daemon before each of its calls, and in the middle of each write.

    That is at scale 1; below, at every n-th call.
    """
    story = field.stories[name]
    with tempfile.TemporaryDirectory(dir=field.folder) as folder:
        life = Life(field.zygote, story, Path(folder, "count"))
        life.shim.log_to(Path(folder, "log"))
        life.live(Death(Action.COUNT, 0))
        writes = sum(call.op in WRITES for call in read_log(Path(folder, "log")))
    step = round(story.stride / scale)
    before = [Death(Action.KILL_BEFORE, at) for at in _points(life.shim.seen, step)]
    halfway = [Death(Action.KILL_HALF, at) for at in _points(writes, step)]
    _kill(field, story, result, before)
    _kill(field, story, result, halfway)


def _points(count: int, step: int) -> range:
    """Return every so many-th of as many points, or the one in the middle where they are fewer."""
    if step < count:
        return range(1, count + 1, step)
    return range(count // 2, count // 2 + 1)


def killed_twice(name: str, field: Ground, result: Result, scale: float) -> None:
    """Kill a daemon, and the next one while it recovers."""
    rng = random.Random(0)
    deaths = []
    for _ in range(scaled(120, scale)):
        at = rng.randrange(60, 300)
        deaths.append(Death(Action.KILL_AFTER, at, rng.randrange(1, 200)))
    _kill(field, field.stories[name], result, deaths)


def _kill(field: Ground, story: Story, result: Result, deaths: list[Death]) -> None:
    with (
        tempfile.TemporaryDirectory(dir=field.folder) as folder,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        live: Callable[[Death, Path], None] = partial(_live, field, story, result)
        roots = [Path(folder, str(number)) for number in range(len(deaths))]
        list(pool.map(live, deaths, roots))


def _live(field: Ground, story: Story, result: Result, death: Death, root: Path) -> None:
    die_and_recover(field.zygote, story, death, root, result)


STORIES = (
    "first start",
    "take over",
    "pin",
    "fetch",
    "fetch from S3",
    "resume and evict",
    "verify, evict, count",
    "ranges",
    "ranges from S3",
    "ranges, taken over",
    "ranges of a shard half fetched",
    "ranges, then the whole",
    "ranges, evicted",
    "ranges of a replaced object",
    "ranges, verified and evicted",
)
ROWS = (
    *(Row(f"SIGKILL: {name}", partial(killed, name), skip=NEEDS_CC) for name in STORIES),
    Row("SIGKILL, and again while it recovers", partial(killed_twice, "fetch"), skip=NEEDS_CC),
    Row("the same: ranges, evicted", partial(killed_twice, "ranges, evicted"), skip=NEEDS_CC),
    Row("SIGKILL: readers with leases", partial(killed_readers, False), skip=NEEDS_CC),
    Row(
        "SIGSTOP: readers with leases, killed as they are or later",
        partial(killed_readers, True),
        skip=NEEDS_CC,
    ),
)
