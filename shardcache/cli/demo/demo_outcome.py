"""Outcome of the demo: what each job read in each epoch, and whether that was right."""

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
        legs: the reports that `demo_training.py` wrote, of each rank for each run of the job that
            read some of the epoch: several runs if it was stopped and resumed.
    """

    job: str
    number: int
    legs: Sequence[Sequence[Json]]

    @property
    def keys(self) -> list[str]:
        """The samples seen, all ranks and legs together."""
        return [key for leg in self.legs for rank in leg for key in rank["keys"]]

    @property
    def steps(self) -> list[list[int]]:
        """Steps of each rank, by leg."""
        return [[rank["steps"] for rank in leg] for leg in self.legs]

    def padding(self, dataset: frozenset[str]) -> int:
        """Return how many samples are repeated so that all ranks of the last leg get as many."""
        *before, last = self.legs
        seen_before = sum(len(rank["keys"]) for leg in before for rank in leg)
        left = len(dataset) - seen_before
        return -left % len(last)

    def wrong_samples(self, dataset: frozenset[str]) -> str:
        """Describe what is wrong with the samples seen.

        Empty if each came once, and the padding twice.
        """
        seen = set(self.keys)
        counts = {"lost": len(dataset - seen), "unknown": len(seen - dataset)}
        problems = [f"{number} {name}" for name, number in counts.items() if number]
        repeated = len(self.keys) - len(seen)
        padding = self.padding(dataset)
        if repeated != padding:
            problems.append(f"{repeated} repeated, expected {padding} as padding")
        return ", ".join(problems)

    def wrong_steps(self) -> str:
        """Describe what is wrong with the ranks' steps.

        Empty if all took the same number, as many as promised.
        """
        for steps in self.steps:
            if len(set(steps)) > 1:
                return f"the ranks took {', '.join(map(str, steps))} steps"
        first, *others = self.legs
        if not others and any(rank["steps"] != rank["promised"] for rank in first):
            return f"{first[0]['steps']} steps, but the loader's length is {first[0]['promised']}"
        return ""

    def to_json(self, dataset: frozenset[str]) -> Json:
        """Return its row of the outcome; the waiting time is of the slowest ranks."""
        problems = [self.wrong_samples(dataset), self.wrong_steps()]
        problem = "; ".join(each for each in problems if each)
        return {
            "job": self.job,
            "epoch": self.number,
            "samples": len(self.keys),
            "padding": self.padding(dataset),
            "legs": [{"ranks": len(steps), "steps": steps} for steps in self.steps],
            "problem": problem or None,
            "waited_s": sum(max(rank["waited_s"] for rank in leg) for leg in self.legs),
        }


def epochs_of(job: str, runs: Iterable[Iterable[Iterable[Json]]]) -> list[Epoch]:
    """Join the reports of a job's runs.

    Args:
        runs: for each run and rank, the list of epochs that `demo_training.py` wrote.
    """
    legs: dict[int, list[Sequence[Json]]] = {}
    for ranks in runs:
        for rows in zip(*ranks, strict=True):
            legs.setdefault(rows[0]["epoch"], []).append(rows)
    return [Epoch(job, number, reports) for number, reports in sorted(legs.items())]


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The demo's measurements and verdicts."""

    samples: frozenset[str]  # keys of the dataset's
    shards: int
    size_bytes: int  # of its shards
    epochs: Sequence[Epoch]
    origin_bytes: int  # that the daemon fetched

    @property
    def checks(self) -> dict[str, bool]:
        """The verdicts.

        Whether every job saw each sample once per epoch, and the padding twice; all ranks of a job
        took the same number of steps, as many as their loaders promised; the dataset was downloaded
        once for all jobs.
        """
        return {
            "exactly_once": not any(epoch.wrong_samples(self.samples) for epoch in self.epochs),
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
            "samples": len(self.samples),
            "size_bytes": self.size_bytes,
        }
        head = {
            "ok": self.ok,
            "checks": self.checks,
            "dataset": dataset,
            "origin_bytes": self.origin_bytes,
        }
        return {**head, "epochs": [epoch.to_json(self.samples) for epoch in self.epochs]}


def show(outcome: DemoOutcome) -> None:
    """Print a table of the epochs, and what was fetched."""

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
        row = epoch.to_json(outcome.samples)
        samples = len(outcome.samples & set(epoch.keys))
        counts = (row["job"], str(row["epoch"]), f"{samples:,}", str(row["padding"]))
        steps = ", then ".join(" | ".join(map(str, leg)) for leg in epoch.steps)
        verdicts = (
            verdict(epoch.wrong_samples(outcome.samples)),
            steps,
            verdict(epoch.wrong_steps()),
        )
        table.add_row(*counts, *verdicts, duration(row["waited_s"]))
    console = common.make_console()
    fetched = outcome.origin_bytes
    whole = outcome.size_bytes
    console.print("", table, sep="\n")
    once = "[green]once[/green]" if outcome.checks["fetched_once"] else "[red]not once[/red]"
    console.print(
        f"\nfrom the origin: {size(fetched)}, {fetched / whole:.2f} × the dataset's "
        f"{size(whole)}: {once}",
    )
    console.print(f"read by the jobs: {size(len(outcome.epochs) * whole)}, from the node's disk")
