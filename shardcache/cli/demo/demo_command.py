"""`shardcache demo`: a store, a daemon and two training jobs, and a check of what they read.

`demo_node` runs the store, the daemon and the jobs; `demo_training` is the program of a job;
`demo_outcome` checks the jobs' reports. With --data, only the sample data of the documentation is
written (`demo_data`).
"""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from shardcache.cli import common
from shardcache.cli.demo.demo_data import SHAPES, draw_shape, write_data
from shardcache.cli.demo.demo_node import RANKS, DemoNode, s3_server
from shardcache.cli.demo.demo_outcome import DemoOutcome, Epoch, epochs_of, print_outcome
from shardcache.shared.exceptions import ConfigError, ShardcacheError

_IMAGES = 577  # a number that cannot be divided by the number of ranks or workers
_PIXELS = 64
_STOP_AFTER = 8  # number of batches of the last epoch after which a job stops, about half of them


@common.examples("demo", "demo --data data")
@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Only write the sample data of the documentation's pages, into this new folder.",
)
@common.json_option
def demo(data: Path | None, as_json: bool) -> None:
    """Run a complete example on this machine, without external services.

    Starts an S3 server, writes a small dataset of JPEG images to it, and starts a daemon with an
    empty cache. Two training jobs then run at the same time for 2 epochs, each with 2 ranks of 2
    DataLoader workers. One of them is stopped midway and resumes from its checkpoint with 1 rank.
    Exits 1 unless every job read each sample exactly once per epoch (apart from padding), all ranks
    took the same number of steps, and the dataset was downloaded only once. Removes all its files
    at the end.
    """
    if data is not None:
        _write_data(data, as_json=as_json)
        return
    _require_packages("torch", "moto", "flask", "PIL")
    # SIGTERM causes the same orderly shutdown as Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Modules that only the demo needs are imported in functions, so that `shardcache --help` starts
    # sooner.
    import asyncio

    announce: Callable[[str], object] = _ignore
    if not as_json:
        announce = common.make_console().print
    with tempfile.TemporaryDirectory(prefix="shardcache-demo-") as folder:
        outcome = asyncio.run(_run(Path(folder), announce))
    if as_json:
        common.print_json(outcome.to_json())
    else:
        print_outcome(outcome)
    if not outcome.has_passed:
        common.fail()


def _ignore(line: str) -> None:
    """Ignore a line that describes a step of the demo."""


def _require_packages(*packages: str) -> None:
    """Raise ShardcacheError if any of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ShardcacheError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            remedy="pip install 'shardcache[demo]'",
        )


def _write_data(folder: Path, *, as_json: bool) -> None:
    """Write the documentation's data into a new or empty folder, and print the names of the data.

    Raises ConfigError for a folder that is not empty.
    """
    _require_packages("PIL")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty",
            remedy="name a new folder: --data DIR",
        )
    write_data(folder)
    names = sorted(path.name for path in folder.iterdir())
    if as_json:
        common.print_json({"folder": str(folder), "names": names})
    else:
        common.make_console().print(f"{folder}: {', '.join(names)}")


async def _run(folder: Path, announce: Callable[[str], object]) -> DemoOutcome:
    """Run the demo in a folder, and return its outcome.

    Args:
        folder: an empty folder.
        announce: called with a line about each step, before the step.
    """
    import asyncio

    announce(f"drawing {_IMAGES} JPEG images")
    keys = await asyncio.to_thread(_draw_images, folder / "images")
    with s3_server() as endpoint:
        announce(
            f"starting an S3 server at {endpoint}, and writing them to it as tar shards: "
            "shardcache write",
        )
        node = DemoNode(folder, endpoint)
        dataset = await node.write(folder / "images")
        announce("starting a daemon with an empty cache")
        async with node.daemon():
            announce(
                f"training 2 concurrent jobs from {dataset['index']}: {RANKS} ranks × 2 workers "
                "each;",
            )
            announce(
                "the second is stopped midway through its last epoch, and resumes from its "
                "checkpoint with 1 rank",
            )
            epochs = await _train(node, dataset["index"])
            status = await node.status()
    return DemoOutcome(
        dataset_keys=keys,
        shards=dataset["shards"],
        size_bytes=dataset["bytes"],
        epochs=epochs,
        origin_bytes=status["counters"]["origin_bytes"],
    )


async def _train(node: DemoNode, url: str) -> list[Epoch]:
    """Run both jobs at the same time; return the epochs that they read.

    Args:
        node: the node, whose daemon is running.
        url: url of the dataset's index file.
    """
    import asyncio

    # The jobs have different seeds and so read in different orders, but one download serves both.
    # Each function returns the reports of the job's runs: for each run, those of its ranks.
    async def train_first() -> list[list[Any]]:
        return [await node.train(url, name="first", job="first", seed=0)]

    async def train_second() -> list[list[Any]]:
        stopped = await node.train(url, name="second", job="second", seed=1, stop_after=_STOP_AFTER)
        resumed = await node.train(url, name="resumed", job="second", seed=1, ranks=1)
        return [stopped, resumed]

    try:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(train_first())
            second = group.create_task(train_second())
    except ExceptionGroup as group_error:
        first_error = group_error.exceptions[0]
        raise first_error from None
    return [*epochs_of("first", first.result()), *epochs_of("second", second.result())]


def _draw_images(folder: Path) -> frozenset[str]:
    """Draw the images, `<shape>/<number>.jpg`, into a folder; return their names without suffix.

    The names are the keys of the samples.
    """
    rng = random.Random(0)
    keys = [f"{rng.choice(list(SHAPES))}/{number:03d}" for number in range(_IMAGES)]
    for key in keys:
        path = folder / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_shape(path.parent.name, rng, _PIXELS, _PIXELS))
    return frozenset(keys)
