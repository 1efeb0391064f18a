"""Outcome of the demo: the samples that each job read in each epoch, and verdicts about them.

Each rank of a run of a job writes a report for each epoch. A leg is the part of an epoch that one
run has read: a job that is stopped and resumed reads an epoch in two legs. Padding is samples that
are repeated so that all ranks of a job get equally many. A sample is known by its key, and
`dataset_keys` are the keys of all samples.
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
        legs: for each leg, the reports of the ranks, as `demo_training.py` writes them.
    """

    job: str
    number: int
    legs: Sequence[Sequence[Json]]

    @property
    def keys(self) -> list[str]:
        """Keys of the samples that all ranks read in all legs, with repetitions."""
        reports = [report for leg in self.legs for report in leg]
        return [key for report in reports for key in report["keys"]]

    @property
    def steps(self) -> list[list[int]]:
        """For each leg, the number of steps of each rank."""
        return [[report["steps"] for report in leg] for leg in self.legs]

    def padding(self, dataset_keys: frozenset[str]) -> int:
        """Return the number of samples that have to be repeated to give all ranks equally many.

        Only the last leg has padding, as it reads to the end of the epoch.
        """
        *earlier_legs, last_leg = self.legs
        read_before = sum(len(report["keys"]) for leg in earlier_legs for report in leg)
        unread = len(dataset_keys) - read_before
        return -unread % len(last_leg)  # fills up to the next multiple of the number of ranks

    def sample_problems(self, dataset_keys: frozenset[str]) -> str:
        """Describe the errors in the samples that were read.

        Returns "" if each sample of the dataset was read once, and the padding twice.
        """
        distinct = set(self.keys)
        lost = len(dataset_keys - distinct)
        unknown = len(distinct - dataset_keys)
        problems = []
        if lost:
            problems.append(f"{lost} lost")
        if unknown:
            problems.append(f"{unknown} unknown")
        repeated = len(self.keys) - len(distinct)
        padding = self.padding(dataset_keys)
        if repeated != padding:
            problems.append(f"{repeated} repeated, expected {padding} as padding")
        return ", ".join(problems)

    def step_problem(self) -> str:
        """Describe an error in the ranks' steps; "" if all took the promised number.

        The promised number of a rank is the length of its loader.
        """
        for steps in self.steps:
            if len(set(steps)) > 1:
                return f"the ranks took {', '.join(map(str, steps))} steps"
        # A loader's length is that of a whole epoch, and one leg of several takes fewer steps.
        if len(self.legs) > 1:
            return ""
        for report in self.legs[0]:
            steps = report["steps"]
            promised = report["promised"]
            if steps != promised:
                return f"{steps} steps, but the loader's length is {promised}"
        return ""

    def to_json(self, dataset_keys: frozenset[str]) -> Json:
        """Return the epoch's row in the outcome.

        The row's waiting time is that of the rank that waited longest, of each leg.
        """
        problems = [self.sample_problems(dataset_keys), self.step_problem()]
        problem = "; ".join(each for each in problems if each)
        return {
            "job": self.job,
            "epoch": self.number,
            "samples": len(self.keys),
            "padding": self.padding(dataset_keys),
            "legs": [{"ranks": len(steps), "steps": steps} for steps in self.steps],
            "problem": problem or None,
            "waited_s": sum(max(report["waited_s"] for report in leg) for leg in self.legs),
        }


def epochs_of(job: str, runs: Iterable[Iterable[Iterable[Json]]]) -> list[Epoch]:
    """Join the reports of a job's runs into epochs.

    Args:
        job: name of the job.
        runs: for each run and each of its ranks, the reports of the epochs.
    """
    legs_by_epoch: dict[int, list[Sequence[Json]]] = {}
    for reports_by_rank in runs:
        # All ranks of a run report the same epochs, so a leg is one report of each rank.
        for leg in zip(*reports_by_rank, strict=True):
            epoch = leg[0]["epoch"]
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
                epoch.sample_problems(self.dataset_keys) for epoch in self.epochs
            ),
            "equal_steps": not any(epoch.step_problem() for epoch in self.epochs),
            "fetched_once": self.origin_bytes == self.size_bytes,
        }

    @property
    def has_passed(self) -> bool:
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
            "ok": self.has_passed,
            "checks": self.checks,
            "dataset": dataset,
            "origin_bytes": self.origin_bytes,
            "epochs": [epoch.to_json(self.dataset_keys) for epoch in self.epochs],
        }


def print_outcome(outcome: DemoOutcome) -> None:
    """Print a table of the epochs, and the number of bytes that were fetched."""
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
        steps_by_leg = [" | ".join(map(str, steps)) for steps in epoch.steps]
        table.add_row(
            row["job"],
            str(row["epoch"]),
            f"{distinct_samples:,}",
            str(row["padding"]),
            _verdict(epoch.sample_problems(outcome.dataset_keys)),
            ", then ".join(steps_by_leg),
            _verdict(epoch.step_problem()),
            duration(row["waited_s"]),
        )
    console = common.make_console()
    console.print("", table, sep="\n")
    fetched_bytes = outcome.origin_bytes
    dataset_bytes = outcome.size_bytes
    fetched_share = fetched_bytes / dataset_bytes
    once = "[green]once[/green]" if outcome.checks["fetched_once"] else "[red]not once[/red]"
    console.print(
        f"\nfrom the origin: {size(fetched_bytes)}, {fetched_share:.2f} × the "
        f"dataset's {size(dataset_bytes)}: {once}",
    )
    read_bytes = len(outcome.epochs) * dataset_bytes
    console.print(f"read by the jobs: {size(read_bytes)}, from the node's disk")


def _verdict(problem: str) -> str:
    """Return "yes" in green if there is no problem, and "no" with the problem in red otherwise."""
    if problem:
        return f"[red]no: {problem}[/red]"
    return "[green]yes[/green]"
