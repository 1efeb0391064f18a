"""What the demo's jobs saw, and whether that is what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dataset:
    """What was put into the store: the samples' keys, the shards' number and their bytes together."""

    keys: frozenset[str]
    shards: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Leg:
    """What one run of a job read of an epoch, which may be all of it.

    Attributes:
        keys: of all ranks together.
        steps: that each rank took.
        promised: what the length of each rank's loader was, which is that of a whole epoch.
        loss: mean over the samples.
        waited_s: for data, of the rank that waited longest.
    """

    keys: tuple[str, ...]
    steps: tuple[int, ...]
    promised: tuple[int, ...]
    loss: float
    waited_s: float

    @property
    def ranks(self) -> int:
        """How many there were."""
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one job: a leg, or several where the job was stopped and went on."""

    job: str
    epoch: int
    legs: tuple[Leg, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The samples seen, all ranks and legs together."""
        return tuple(key for leg in self.legs for key in leg.keys)

    @property
    def loss(self) -> float:
        """Mean over the samples."""
        return sum(leg.loss * len(leg.keys) for leg in self.legs) / max(len(self.keys), 1)

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for data, in each leg those of the rank that waited longest."""
        return sum(leg.waited_s for leg in self.legs)

    def padding(self, dataset: Dataset) -> int:
        """Return how many samples have to come once more, so that all ranks of the last leg get equally many."""
        *before, last = self.legs
        return -(len(dataset.keys) - sum(len(leg.keys) for leg in before)) % last.ranks

    def wrong_samples(self, dataset: Dataset) -> str:
        """Return what is wrong with the samples seen: nothing when each came once, and the padding twice."""
        seen = set(self.keys)
        counts = {"lost": len(dataset.keys - seen), "unknown": len(seen - dataset.keys)}
        problems = [f"{number} {name}" for name, number in counts.items() if number]
        repeated, padding = len(self.keys) - len(seen), self.padding(dataset)
        if repeated != padding:
            problems.append(f"{repeated} repeated, padding is {padding}")
        return ", ".join(problems)

    def wrong_steps(self) -> str:
        """Return what is wrong with the ranks' steps: nothing when all took the same, as many as was promised."""
        for leg in self.legs:
            if len(set(leg.steps)) > 1:
                return f"the ranks took {', '.join(map(str, leg.steps))} steps"
        first, *others = self.legs
        if not others and first.steps != first.promised:
            return f"{first.steps[0]} steps, the loader's length is {first.promised[0]}"
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that the demo measured."""

    dataset: Dataset
    epochs: tuple[Epoch, ...]
    origin_bytes: int

    @property
    def exactly_once(self) -> bool:
        """Whether every job saw each sample once in each epoch, and the padding twice."""
        return not any(epoch.wrong_samples(self.dataset) for epoch in self.epochs)

    @property
    def equal_steps(self) -> bool:
        """Whether all ranks of a job took the same number of steps, as many as their loaders had promised."""
        return not any(epoch.wrong_steps() for epoch in self.epochs)

    @property
    def fetched_once(self) -> bool:
        """Whether the dataset crossed the network once for the index and all jobs and epochs."""
        return self.origin_bytes == self.dataset.size_bytes

    @property
    def ok(self) -> bool:
        """Whether the demo shows what it claims."""
        return self.exactly_once and self.equal_steps and self.fetched_once

    def to_json(self) -> Json:
        """Return one JSON object: sizes in bytes, times in seconds."""
        dataset = self.dataset
        return {
            "ok": self.ok,
            "checks": {
                "exactly_once": self.exactly_once,
                "equal_steps": self.equal_steps,
                "fetched_once": self.fetched_once,
            },
            "dataset": {"shards": dataset.shards, "samples": len(dataset.keys), "size_bytes": dataset.size_bytes},
            "origin_bytes": self.origin_bytes,
            "epochs": [self._row(epoch) for epoch in self.epochs],
        }

    def _row(self, epoch: Epoch) -> Json:
        problems = (epoch.wrong_samples(self.dataset), epoch.wrong_steps())
        return {
            "job": epoch.job,
            "epoch": epoch.epoch,
            "samples": len(epoch.keys),
            "padding": epoch.padding(self.dataset),
            "legs": [{"ranks": leg.ranks, "steps": list(leg.steps)} for leg in epoch.legs],
            "problem": "; ".join(filter(None, problems)) or None,
            "loss": epoch.loss,
            "waited_s": epoch.waited_s,
        }


def epochs_of(job: str, runs: Sequence[Sequence[Sequence[Json]]]) -> list[Epoch]:
    """Join the reports of a job's runs: for each run and rank what `train.py` writes, an entry an epoch."""
    legs: dict[int, list[Leg]] = {}
    for ranks in runs:
        for rows in zip(*ranks, strict=True):
            legs.setdefault(rows[0]["epoch"], []).append(_leg(rows))
    return [Epoch(job, epoch, tuple(parts)) for epoch, parts in sorted(legs.items())]


def _leg(rows: Sequence[Json]) -> Leg:
    keys = tuple(key for row in rows for key in row["keys"])
    return Leg(
        keys=keys,
        steps=tuple(row["steps"] for row in rows),
        promised=tuple(row["promised"] for row in rows),
        loss=sum(row["loss"] * len(row["keys"]) for row in rows) / max(len(keys), 1),
        waited_s=max(row["waited_s"] for row in rows),
    )
