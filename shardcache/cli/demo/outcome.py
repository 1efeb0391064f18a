"""What the demo's jobs saw, and whether that is what was promised."""

from __future__ import annotations

from collections import Counter
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
class Epoch:
    """One epoch of one job, all ranks together; `waited_s` is that of the rank that waited longest."""

    job: str
    epoch: int
    keys: tuple[str, ...]
    loss: float
    waited_s: float

    def problem(self, dataset: Dataset) -> str:
        """Return what is wrong with the samples seen, or nothing when each came exactly once."""
        seen = Counter(self.keys)
        counts = {
            "lost": len(dataset.keys - seen.keys()),
            "unknown": len(seen.keys() - dataset.keys),
            "repeated": sum(times > 1 for times in seen.values()),
        }
        return ", ".join(f"{number} {name}" for name, number in counts.items() if number)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that the demo measured."""

    dataset: Dataset
    epochs: tuple[Epoch, ...]
    origin_bytes: int

    @property
    def exactly_once(self) -> bool:
        """Whether every job saw each sample once in each epoch."""
        return not any(epoch.problem(self.dataset) for epoch in self.epochs)

    @property
    def fetched_once(self) -> bool:
        """Whether the dataset crossed the network once for all jobs and epochs."""
        return self.origin_bytes == self.dataset.size_bytes

    @property
    def ok(self) -> bool:
        """Whether the demo shows what it claims."""
        return self.exactly_once and self.fetched_once

    def to_json(self) -> Json:
        """Return one JSON object: sizes in bytes, times in seconds."""
        dataset = self.dataset
        return {
            "ok": self.ok,
            "checks": {"exactly_once": self.exactly_once, "fetched_once": self.fetched_once},
            "dataset": {"shards": dataset.shards, "samples": len(dataset.keys), "size_bytes": dataset.size_bytes},
            "origin_bytes": self.origin_bytes,
            "epochs": [self._row(epoch) for epoch in self.epochs],
        }

    def _row(self, epoch: Epoch) -> Json:
        return {
            "job": epoch.job,
            "epoch": epoch.epoch,
            "samples": len(epoch.keys),
            "problem": epoch.problem(self.dataset) or None,
            "loss": epoch.loss,
            "waited_s": epoch.waited_s,
        }


def epochs_of(job: str, ranks: list[list[Json]]) -> list[Epoch]:
    """Join the reports of a job's ranks, each a list with an entry an epoch as `train.py` writes them."""
    return [_joined(job, number, parts) for number, parts in enumerate(zip(*ranks, strict=True))]


def _joined(job: str, number: int, parts: tuple[Json, ...]) -> Epoch:
    keys = tuple(key for part in parts for key in part["keys"])
    loss_sum = sum(part["loss"] * len(part["keys"]) for part in parts)
    return Epoch(job, number, keys, loss_sum / max(len(keys), 1), max(part["waited_s"] for part in parts))
