"""Outcome of the demo: the samples that each job read in each epoch, and verdicts about them.

A leg is the part of an epoch that one run of a job has read: a job that is stopped and resumed
reads an epoch in two legs. Padding is samples that are repeated so that all ranks of a job get
equally many. A sample is known by its key, and `dataset_keys` are the keys of all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardcache.cli import common
from shardcache.shared.protocol import Json
from shardcache.shared.units import duration, size


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one job.

    Attributes:
        job: name of the job.
        number: number of the epoch.
        legs: for each leg, the reports that the ranks of its run wrote (`demo_training.py`).
    """

    job: str
    number: int
    legs: Sequence[Sequence[Json]]

    @property
    def keys(self) -> list[str]:
        """Keys of the samples that were read, by all ranks in all legs; repeated as they were."""
        return [key for leg in self.legs for rank in leg for key in rank["keys"]]

    @property
    def steps(self) -> list[list[int]]:
        """For each leg, the number of steps of each rank."""
        return [[rank["steps"] for rank in leg] for leg in self.legs]

    def padding(self, dataset_keys: frozenset[str]) -> int:
        """Return the number of samples that have to be repeated to give all ranks equally many.

        Only the last leg has padding, as it reads to the end of the epoch.
        """
        *earlier_legs, last_leg = self.legs
        seen_before = sum(len(rank["keys"]) for leg in earlier_legs for rank in leg)
        unseen = len(dataset_keys) - seen_before
        return -unseen % len(last_leg)  # fills up to the next multiple of the number of ranks

    def wrong_samples(self, dataset_keys: frozenset[str]) -> str:
        """Describe the errors in the samples that were read.

        The result is empty if each sample of the dataset was read once, and the padding twice.
        """
        seen = set(self.keys)
        counts = {"lost": len(dataset_keys - seen), "unknown": len(seen - dataset_keys)}
        problems = [f"{number} {name}" for name, number in counts.items() if number]
        repeated = len(self.keys) - len(seen)
        padding = self.padding(dataset_keys)
        if repeated != padding:
            problems.append(f"{repeated} repeated, expected {padding} as padding")
        return ", ".join(problems)

    def wrong_steps(self) -> str:
        """Describe the errors in the ranks' steps; empty if all took the promised number.

        The promise is the length of a rank's loader.
        """
        for steps in self.steps:
            if len(set(steps)) > 1:
                return f"the ranks took {', '.join(map(str, steps))} steps"
        # A loader's length is that of a whole epoch, and one leg of several takes fewer steps.
        if len(self.legs) > 1:
            return ""
        for rank in self.legs[0]:
            if rank["steps"] != rank["promised"]:
                return f"{rank['steps']} steps, but the loader's length is {rank['promised']}"
        return ""

    def to_json(self, dataset_keys: frozenset[str]) -> Json:
        """Return the epoch's row in the outcome; its waiting time is that of the slowest ranks."""
        problems = [self.wrong_samples(dataset_keys), self.wrong_steps()]
        problem = "; ".join(each for each in problems if each)
        return {
            "job": self.job,
            "epoch": self.number,
            "samples": len(self.keys),
            "padding": self.padding(dataset_keys),
            "legs": [{"ranks": len(steps), "steps": steps} for steps in self.steps],
            "problem": problem or None,
            "waited_s": sum(max(rank["waited_s"] for rank in leg) for leg in self.legs),
        }


def epochs_of(job: str, runs: Iterable[Iterable[Iterable[Json]]]) -> list[Epoch]:
    """Join the reports of a job's runs into epochs.

    Args:
        job: name of the job.
        runs: for each run and each of its ranks, the list of epochs that `demo_training.py` wrote.
    """
    legs_by_epoch: dict[int, list[Sequence[Json]]] = {}
    for ranks in runs:
        # The reports are lists of epochs, one list per rank. Each leg has the ranks of one epoch.
        for leg in zip(*ranks, strict=True):
            epoch = leg[0]["epoch"]  # the same for all ranks
            legs_by_epoch.setdefault(epoch, []).append(leg)
    return [Epoch(job, number, legs) for number, legs in sorted(legs_by_epoch.items())]


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The demo's measurements and verdicts.

    Attributes:
        dataset_keys: keys of the dataset's samples.
        shards: number of the dataset's shards.
        size_bytes: size of all shards together.
        epochs: the epochs of all jobs.
        origin_bytes: number of bytes that the daemon fetched.
    """

    dataset_keys: frozenset[str]
    shards: int
    size_bytes: int
    epochs: Sequence[Epoch]
    origin_bytes: int

    @property
    def checks(self) -> dict[str, bool]:
        """The verdicts, True for a check that passed.

        `exactly_once`: every job read each sample once per epoch, and the padding twice.
        `equal_steps`: all ranks of a job took the number of steps that their loaders promised.
        `fetched_once`: the dataset was downloaded once for all jobs.
        """
        return {
            "exactly_once": not any(
                epoch.wrong_samples(self.dataset_keys) for epoch in self.epochs
            ),
            "equal_steps": not any(epoch.wrong_steps() for epoch in self.epochs),
            "fetched_once": self.origin_bytes == self.size_bytes,
        }

    @property
    def ok(self) -> bool:
        """True if all checks passed."""
        return all(self.checks.values())

    def to_json(self) -> Json:
        """Return one JSON object: sizes in bytes, times in seconds."""
        dataset = {
            "shards": self.shards,
            "samples": len(self.dataset_keys),
            "size_bytes": self.size_bytes,
        }
        return {
            "ok": self.ok,
            "checks": self.checks,
            "dataset": dataset,
            "origin_bytes": self.origin_bytes,
            "epochs": [epoch.to_json(self.dataset_keys) for epoch in self.epochs],
        }


def show(outcome: DemoOutcome) -> None:
    """Print a table of the epochs, and the number of bytes that were fetched."""

    def verdict(problem: str) -> str:
        return f"[red]no: {problem}[/red]" if problem else "[green]yes[/green]"

    columns = (
        "job",
        "epoch",
        "samples",
        "padding",
        "each once",
        "steps by rank",
        "equal",
        "data wait",
    )
    table = common.make_table(*columns, numbers=("epoch", "samples", "padding", "data wait"))
    for epoch in outcome.epochs:
        row = epoch.to_json(outcome.dataset_keys)
        # Here, each sample of the dataset counts once. The number in `row` counts repeated and
        # unknown samples, too.
        distinct_samples = len(outcome.dataset_keys & set(epoch.keys))
        steps = ", then ".join(" | ".join(map(str, leg)) for leg in epoch.steps)
        table.add_row(
            row["job"],
            str(row["epoch"]),
            f"{distinct_samples:,}",
            str(row["padding"]),
            verdict(epoch.wrong_samples(outcome.dataset_keys)),
            steps,
            verdict(epoch.wrong_steps()),
            duration(row["waited_s"]),
        )
    console = common.make_console()
    console.print("", table, sep="\n")
    fetched_bytes = outcome.origin_bytes
    dataset_bytes = outcome.size_bytes
    once = "[green]once[/green]" if outcome.checks["fetched_once"] else "[red]not once[/red]"
    console.print(
        f"\nfrom the origin: {size(fetched_bytes)}, {fetched_bytes / dataset_bytes:.2f} × the "
        f"dataset's {size(dataset_bytes)}: {once}",
    )
    read_bytes = len(outcome.epochs) * dataset_bytes
    console.print(f"read by the jobs: {size(read_bytes)}, from the node's disk")
