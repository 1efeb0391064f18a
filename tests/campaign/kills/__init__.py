"""The daemon is killed (SIGKILL) at each call by which it changes a file, one life for each call, and started again.

Published shards must be intact and served without being fetched again, finished parts be used, `used_bytes` agree with
the disk, and nothing lie about that nobody counts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from campaign.kills.life import WRITES, Death, Life, Story, die_and_recover
from campaign.kills.readers import kill_readers
from campaign.kills.stories import stories
from campaign.result import Result
from support.disks.shim import Action, read_log
from support.programs.zygote import Zygote
from support.stores.moto_s3 import MotoS3

_AT_ONCE = 3
_TWICE = 120
_READERS = 200


def run(scale: float, folder: Path) -> Iterator[Result]:
    """Kill at every point at scale 1, at every n-th below."""
    numbers = itertools.count()
    with MotoS3() as server, Zygote() as zygote, ThreadPoolExecutor(_AT_ONCE) as pool:
        told = stories(zygote, server, folder)
        for story in told:
            deaths = _deaths(zygote, story, folder / f"count-{next(numbers)}", scale)
            yield _kill(pool, zygote, story, deaths, folder, numbers)
        twice = "SIGKILL, and again while it recovers"
        yield _kill(pool, zygote, told[3], _double_deaths(scale), folder, numbers, twice)
        yield kill_readers(zygote, told[1].source, folder / "readers", round(_READERS * scale))


def _kill(
    pool: ThreadPoolExecutor,
    zygote: Zygote,
    story: Story,
    deaths: list[Death],
    folder: Path,
    numbers: Iterator[int],
    fault: str = "",
) -> Result:
    result = Result("kills", fault or f"SIGKILL: {story.name}")
    lives = [
        pool.submit(die_and_recover, zygote, story, death, folder / str(number), result)
        for death, number in zip(deaths, numbers, strict=False)
    ]
    for life in lives:
        life.result()
    return result


def _deaths(zygote: Zygote, story: Story, folder: Path, scale: float) -> list[Death]:
    """Return a death before each call of an undisturbed life, and one in the middle of each write."""
    step = max(1, round(story.stride / scale))
    life = Life(zygote, story, folder)
    life.shim.log_to(folder / "log")
    life.live(Death(Action.COUNT, 0))
    writes = sum(call.op in WRITES for call in read_log(folder / "log"))
    before = [Death(Action.KILL_BEFORE, at) for at in range(1, life.shim.seen + 1, step)]
    return before + [Death(Action.KILL_HALF, at) for at in range(1, writes + 1, step)]


def _double_deaths(scale: float) -> list[Death]:
    rng = random.Random(0)
    count = max(2, round(_TWICE * scale))
    return [Death(Action.KILL_AFTER, rng.randrange(60, 300), rng.randrange(1, 200)) for _ in range(count)]
