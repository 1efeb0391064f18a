"""The demo's outcome: the samples that each job read, and the checks on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The uploaded dataset: its samples' keys, its number of shards and their total size."""

    keys: frozenset[str]
    shards: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Leg:
    """The part of an epoch that one run of a job read, possibly all of it.

    Attributes:
        keys: keys of the samples read, all ranks together.
        steps: number of steps of each rank.
        promised: length of each rank's loader, for a whole epoch.
        loss: mean over the samples.
        waited_s: time spent waiting for data, of the rank that waited longest.
    """

    keys: tuple[str, ...]
    steps: tuple[int, ...]
    promised: tuple[int, ...]
    loss: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one job: one leg, or several if the job was stopped and resumed."""

    job: str
    epoch: int
    legs: tuple[Leg, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The samples seen, all ranks and legs together."""
        return tuple(key for leg in self.legs for key in leg.keys)

    @property
    def loss(self) -> float:
        """Mean loss over the samples."""
        return sum(leg.loss * len(leg.keys) for leg in self.legs) / max(len(self.keys), 1)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for data: the sum over legs of the rank that waited longest."""
        return sum(leg.waited_s for leg in self.legs)

    def padding(self, dataset: Dataset) -> int:
        """Return the number of samples repeated so that all ranks of the last leg get the same number."""
        *before, last = self.legs
        return -(len(dataset.keys) - sum(len(leg.keys) for leg in before)) % len(last.steps)

    def wrong_samples(self, dataset: Dataset) -> str:
        """Describe what is wrong with the samples seen; empty if each came once, and the padding twice."""
        seen = set(self.keys)
        counts = {"lost": len(dataset.keys - seen), "unknown": len(seen - dataset.keys)}
        problems = [f"{number} {name}" for name, number in counts.items() if number]
        repeated, padding = len(self.keys) - len(seen), self.padding(dataset)
        if repeated != padding:
            problems.append(f"{repeated} repeated, expected {padding} as padding")
        return ", ".join(problems)

    def wrong_steps(self) -> str:
        """Describe what is wrong with the ranks' steps; empty if all took the same number, as many as promised."""
        for leg in self.legs:
            if len(set(leg.steps)) > 1:
                return f"the ranks took {', '.join(map(str, leg.steps))} steps"
        first, *others = self.legs
        if not others and first.steps != first.promised:
            return f"{first.steps[0]} steps, but the loader's length is {first.promised[0]}"
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The demo's measurements and verdicts."""

    dataset: Dataset
    epochs: tuple[Epoch, ...]
    origin_bytes: int

    @property
    def checks(self) -> dict[str, bool]:
        """The verdicts.

        Whether every job saw each sample once per epoch, and the padding twice; all ranks of a job took the same number
        of steps, as many as their loaders promised; the dataset was downloaded once for the index and all jobs.
        """
        return {
            "exactly_once": not any(epoch.wrong_samples(self.dataset) for epoch in self.epochs),
            "equal_steps": not any(epoch.wrong_steps() for epoch in self.epochs),
            "fetched_once": self.origin_bytes == self.dataset.size_bytes,
        }

    @property
    def ok(self) -> bool:
        """True if all checks passed."""
        return all(self.checks.values())

    def to_json(self) -> Json:
        """Return one JSON object: sizes in bytes, times in seconds."""
        dataset = self.dataset
        return {
            "ok": self.ok,
            "checks": self.checks,
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
            "legs": [{"ranks": len(leg.steps), "steps": list(leg.steps)} for leg in epoch.legs],
            "problem": "; ".join(filter(None, problems)) or None,
            "loss": epoch.loss,
            "waited_s": epoch.waited_s,
        }


def epochs_of(job: str, runs: Sequence[Sequence[Sequence[Json]]]) -> list[Epoch]:
    """Join the reports of a job's runs: for each run and rank, the list of epochs written by `train.py`."""
    legs: dict[int, list[Leg]] = {}
    for ranks in runs:
        for rows in zip(*ranks, strict=True):
            keys = tuple(key for row in rows for key in row["keys"])
            steps, promised = (tuple(row[name] for row in rows) for name in ("steps", "promised"))
            loss = sum(row["loss"] * len(row["keys"]) for row in rows) / max(len(keys), 1)
            leg = Leg(keys, steps, promised, loss, max(row["waited_s"] for row in rows))
            legs.setdefault(rows[0]["epoch"], []).append(leg)
    return [Epoch(job, epoch, tuple(parts)) for epoch, parts in sorted(legs.items())]
