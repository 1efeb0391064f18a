"""The power is cut at each call by which the daemon changes a file, and the disk left in states that fsync allows.

The calls of undisturbed lives are logged and replayed in a model of a disk; the store's own recovery is run over what
that disk may hold. What is visible must be right, what had been flushed must be there, and parts that are gone on with
must be those of the store. A sample of the states is given to the daemon itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from campaign.harness import Result, Row
from campaign.lives import NEEDS_CC, PART_BYTES, SAMPLES, Death, Ground, Life, Story, ground
from campaign.power_disk import Chance, Disk
from shardcache.config import Amount
from shardcache.errors import CorruptShardError, ShardcacheError
from shardcache.origin.base import RemoteObject
from shardcache.store.folder import JOURNAL, PART, SIDECAR, TAR, shard_key
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from support.disks.shim import CHANGES, Action, Call, read_log
from support.programs.zygote import Zygote

__all__ = ["ROWS", "ground"]

_STATES = 6  # of each point
_DAEMONS = 40  # of all states of a story
_LEAST_POINTS = 5


@dataclass(frozen=True, slots=True)
class Record:
    """An undisturbed life: the disk before it, and the calls that changed it."""

    folder: Path
    disk: Disk
    calls: list[Call]

    @classmethod
    def of(cls, zygote: Zygote, story: Story, folder: Path) -> Self:
        """Have the story told in a new folder."""
        folder.mkdir()
        life = Life(zygote, story, folder / "recorded")
        life.cache.mkdir(exist_ok=True)
        disk = Disk(life.cache)
        life.shim.log_to(folder / "log")
        life.live(Death(Action.COUNT, 0), ops=CHANGES)
        return cls(folder, disk, list(read_log(folder / "log")))


def cut(name: str, field: Ground, result: Result, scale: float) -> None:
    """Cut the power after every call at scale 1, after every n-th below."""
    story = field.stories[name]
    record = Record.of(field.zygote, story, field.folder / f"story-{name}")
    step = min(max(1, round(1 / scale)), len(record.calls) // _LEAST_POINTS)
    examine(field.zygote, story, record, result, step=step, daemons=max(1, round(_DAEMONS * scale)))


def examine(zygote: Zygote, story: Story, record: Record, result: Result, *, step: int, daemons: int) -> None:
    """Cut the power after every `step`-th call, and count what is wrong after it; the record is used up."""
    examiner = Examiner(zygote, story, record.folder, record.disk, result)
    rng = random.Random(story.name)
    share = daemons * step / (len(record.calls) * _STATES)
    for number, call in enumerate(record.calls, 1):
        record.disk.do(call)
        for seed in range(_STATES if number % step == 0 else 0):
            how = f"{story.name}, after call {number} ({call.op.name} {call.path}), state {seed}"
            state = record.disk.after(Chance(random.Random(f"{story.name}/{number}/{seed}")))
            examiner.examine(state, how)
            result.injected += 1
            if rng.random() < share:
                examiner.start(state, how)


class Examiner:
    """Lays states out on a real disk and has them recovered."""

    def __init__(self, zygote: Zygote, story: Story, folder: Path, disk: Disk, result: Result) -> None:
        self._story = story
        self._zygote = zygote
        self._folder = folder
        self._disk = disk
        self._result = result
        self._tars = set(story.source.tars.values())
        # What lay there damaged before the story began is found by verify, and by no power cut.
        self._spoilt = {Path(name).stem for name, data in disk.contents() if _is_tar(name) and data not in self._tars}

    def examine(self, state: dict[str, bytes], how: str) -> None:
        """Count what is wrong once the store has recovered from a state."""
        root = self._folder / "state"
        lay_out(root, state)
        try:
            problems = asyncio.run(self._problems(root))
        except ShardcacheError as exn:
            problems = [("untyped", f"the store does not open: {exn!r}")]
        for kind, problem in problems:
            self._result.fail(kind, f"{how}: {problem}")

    async def _problems(self, root: Path) -> list[tuple[str, str]]:
        problems: list[tuple[str, str]] = []
        store = await asyncio.to_thread(Store.open, root, Amount(10**9), Amount(0))
        try:
            on_disk_bytes = sum(each.stat().st_size for each in root.rglob("*.*") if "catalogue" not in str(each))
            if store.space.used_bytes != on_disk_bytes:
                problems.append(("wrong", f"{store.space.used_bytes} bytes counted, {on_disk_bytes} there"))
            problems += [("lost", f"{key} had been flushed") for key in self._certain() - set(store.shards)]
            problems += [
                ("wrong", text) for shard in store.shards.values() for text in await self._faults(store, shard)
            ]
            for part in list(root.glob(f"partial/*{PART}")):
                problems += [("wrong", text) for text in self._bad_parts(store, part)]
            for url in self._story.source.tars:
                row = await store.catalogue.get("shard", url)
                if row is not None and row[1] != SAMPLES:
                    problems.append(("wrong", f"the catalogue says {row} of {url}"))
        finally:
            store.close()
        return problems

    async def _faults(self, store: Store, shard: Shard) -> list[str]:
        if shard.key in self._spoilt:
            return []
        try:
            await store.check(shard)
        except CorruptShardError as exn:
            return [f"a corrupt shard is visible: {exn}"]
        right = store.layout.tar(shard.key).read_bytes() in self._tars
        return [] if right else [f"{shard.key} is visible with bytes that no shard has"]

    def _certain(self) -> set[str]:
        names = set(self._disk.certain())
        tars = {name for name in names if _is_tar(name) and name.removesuffix(TAR) + SIDECAR in names}
        return {Path(name).stem for name in tars}

    def _bad_parts(self, store: Store, part: Path) -> list[str]:
        """Return which of the parts that a download would continue with are not the store's."""
        for url, size_bytes in self._story.source.stored_bytes.items():
            stored = Path(url.removeprefix("file://"))
            if (version := title_of(part).get("version")) and shard_key(url, version) == part.stem:
                partial = Partial.open(store.layout, RemoteObject(url, version, size_bytes), PART_BYTES)
                data, kept = stored.read_bytes(), partial.path.read_bytes()
                spans = [slice(at * PART_BYTES, (at + 1) * PART_BYTES) for at in partial.done]
                return [f"part at {span.start} of {url} is wrong" for span in spans if data[span] != kept[span]]
        return []

    def start(self, state: dict[str, bytes], how: str) -> None:
        """Have the daemon itself recover from a state, and count what is wrong."""
        root = self._folder / "life"
        life = Life(self._zygote, self._story, root)
        lay_out(life.cache, state)
        life.recover(self._result, how, may_fetch=True)
        shutil.rmtree(root)


def _is_tar(name: str) -> bool:
    return name.startswith("shards/") and name.endswith(TAR)


def title_of(part: Path) -> dict[str, str]:
    """Return what a journal says of its part file, or nothing."""
    try:
        title = json.loads(part.with_suffix(JOURNAL).read_bytes().partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    return title if isinstance(title, dict) else {}


def lay_out(root: Path, state: dict[str, bytes]) -> None:
    """Make a folder hold these files, by name, and no others."""
    for path in root.rglob("*"):
        if not path.is_dir():
            path.unlink()
    for name, data in state.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


_STORIES = ("first start", "take over", "pin", "fetch", "resume and evict", "verify, evict, count")
_QUICK = ("fetch",)

ROWS = tuple(Row(f"power cut: {name}", partial(cut, name), slow=name not in _QUICK, skip=NEEDS_CC) for name in _STORIES)
