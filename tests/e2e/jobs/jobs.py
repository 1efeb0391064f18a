"""Training jobs of these tests: functions for `support.programs.ranks`, and their data."""

import json
import logging
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError, ShardcacheError
from shardcache_client.dataset import Joined, ShardDataset
from support.programs.guard import GUARD_S

BATCH = 5
# By attempt, the rank that is killed, and the step of the epoch after which.
KILLED_AT = {0: (1, 4), 1: (0, 6)}


def keys(batch: list[dict[str, Any]]) -> list[str]:
    """Return the keys of a batch."""
    return [sample["__key__"] for sample in batch]


def shuffled(urls: str, socket: str, **options: Any) -> ShardDataset:
    """Return the dataset of most jobs."""
    return ShardDataset(urls, shuffle=True, seed=7, batch_size=BATCH, socket=socket, **options)


def meet(init_method: str | None = None, rank: str | int = -1, world_size: str | int = -1) -> None:
    """Initialise torch.distributed."""
    dist.init_process_group("gloo", init_method, timedelta(seconds=60), int(world_size), int(rank))


def train(socket: str, urls: str, method: str) -> list[list[str]]:
    """Read two epochs by two workers."""
    ds = ShardDataset(urls, shuffle=True, shuffle_window=2, seed=7, socket=socket, job="test-job")
    loader = DataLoader(
        ds, batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    return [[sample["__key__"] for sample in loader] for _ in range(2)]


def look(socket: str, urls: str) -> dict[str, Any]:
    """Train in step with the other rank, while rank 0 alone looks at samples as well."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardcache").addHandler(handler)
    meet()
    rank = dist.get_rank()
    dataset = shuffled(urls, socket, timeout_s=GUARD_S)
    loader: Any = DataLoader(dataset, batch_size=BATCH, num_workers=rank, collate_fn=keys)

    def glance() -> None:
        if not rank:
            for each in (
                dataset,
                loader,
                dataset.loader(batch_size=3, num_workers=1, collate_fn=keys),
            ):
                next(iter(each))

    glance()
    dist.barrier()
    read: list[list[str]] = []
    for _ in range(2):
        read.append([])
        for batch in loader:
            read[-1] += batch
            glance()
            dist.barrier()
        dist.barrier()
    return {"read": read, "warned": warned}


def leave_early(socket: str, urls: str) -> dict[str, list[list[list[str]]]]:
    """Read first batches of three epochs: by `set_epoch`, broken loops and kept iterators."""
    meet()

    def loader() -> Any:
        return shuffled(urls, socket, timeout_s=GUARD_S).loader(num_workers=0, collate_fn=keys)

    fixed = loader()
    found: dict[str, list[list[list[str]]]] = {"set": [], "broken": [], "kept": []}
    for epoch in range(3):
        fixed.set_epoch(epoch)
        found["set"].append(list(islice(fixed, 3)))

    broken = loader()
    for _ in range(3):
        found["broken"].append(list(islice(broken, 3)))
        dist.barrier()

    kept = loader()
    iterators = []
    for _ in range(3):
        iterators.append(iter(kept))
        found["kept"].append(list(islice(iterators[-1], 3)))
        dist.barrier()
    return found


def leave_out_of_step(socket: str, urls: str, workers: str) -> list[list[str]]:
    """Leave three epochs after five batches each, out of step; return the first batches."""
    meet()
    dataset = shuffled(urls, socket, timeout_s=GUARD_S)
    loader: Any = DataLoader(dataset, batch_size=BATCH, num_workers=int(workers), collate_fn=keys)
    begun: list[list[str]] = []
    for _ in range(3):
        first, *_ = islice(loader, 5)
        begun.append(first)
    return begun


def take_last_batches(socket: str, urls: str) -> dict[str, list[list[list[str]]]]:
    """Read three epochs by counting loops: resumed, of one batch each, and with `set_epoch`."""
    meet()

    def loader(batch_size: int) -> Any:
        return shuffled(urls, socket, timeout_s=GUARD_S).loader(
            batch_size=batch_size, num_workers=0, collate_fn=keys
        )

    found: dict[str, list[list[list[str]]]] = {"resumed": [], "single": [], "set": []}
    saving = loader(BATCH)
    for _ in islice(saving, len(saving) - 1):
        state = saving.state_dict()
    del saving
    fixed = loader(BATCH)
    resumed = loader(BATCH)
    resumed.load_state_dict(state)
    single = loader(6 * BATCH)
    for epoch in range(3):
        fixed.set_epoch(epoch)
        found["set"].append(list(islice(fixed, len(fixed))))
        found["resumed"].append(list(islice(resumed, resumed.remaining)))
        found["single"].append(list(islice(single, len(single))))
        dist.barrier()
    return found


def elastic(socket: str, urls: str, out: str) -> None:
    """Gather the keys of each step on rank 0, which saves them with its loader's state.

    In the first two attempts one rank kills itself late in the first epoch; two workers per rank
    outlive it for a moment.
    """
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    meet()
    rank = dist.get_rank()
    loader = shuffled(urls, socket).loader(num_workers=2, collate_fn=keys)
    saved = Path(out, "job.json")
    job = json.loads(saved.read_text()) if saved.exists() else {"read": [], "step": 0}
    if "state" in job:
        loader.load_state_dict(job["state"])
    read = job["read"]
    first = loader.epoch
    for epoch in range(first, 2):
        done = job["step"] if epoch == first else 0
        for step, batch in enumerate(loader, done + 1):
            gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(gathered, batch)
            read += [[epoch, key] for keys_of_rank in gathered for key in keys_of_rank]
            if rank == 0:
                temporary = saved.with_suffix(".new")
                temporary.write_text(
                    json.dumps({"read": read, "step": step, "state": loader.state_dict()})
                )
                temporary.replace(saved)
            if KILLED_AT.get(attempt) == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)


def listed(
    urls: str, socket: str, when: str, workers: str, init_method: str, rank: str, world_size: str
) -> dict[str, Any]:
    """Read one rank's share, or return its error.

    When: `early`, once torch.distributed is initialised, as ever; `alone`, only the last rank makes
    a dataset; `drawn`, the seed is drawn; `split`, all read the same part of a split; `astray`,
    each splits by a seed of its own.
    """
    told: dict[str, Any] = {"keys": None, "error": None}
    meet(init_method, rank, world_size)
    try:
        if when == "alone" and int(rank) < int(world_size) - 1:
            return told
        options = {"shuffle": True, "seed": None} if when == "drawn" else {}
        ds = ShardDataset(
            urls, even=None, socket=socket, timeout_s=3 if when == "alone" else GUARD_S, **options
        )
        if when in ("split", "astray"):
            ds = ds.split(0.5, 0.5, seed=int(rank) if when == "astray" else 0)[0]
        method = {} if workers == "none" else {"num_workers": 2, "multiprocessing_context": workers}
        told["keys"] = [sample["__key__"] for sample in DataLoader(ds, batch_size=None, **method)]
    except ShardcacheError as exn:
        told["error"] = f"{type(exn).__name__}: {exn}"
    return told


def joined(
    urls: str, partners: str, socket: str, init_method: str, rank: str, world_size: str
) -> dict[str, Any]:
    """Read one rank's share of joined samples, or return its error.

    The partners' shards are listed before torch.distributed is initialised, so by each rank itself.
    """
    told: dict[str, Any] = {"keys": None, "error": None}
    other = ShardDataset(partners, socket=socket)
    meet(init_method, rank, world_size)
    try:
        ds = Joined({"": ShardDataset(urls, even=None, socket=socket), "cap": other})
        told["keys"] = [sample["__key__"] for sample in ds]
    except ShardcacheError as exn:
        told["error"] = f"{type(exn).__name__}: {exn}"
    return told


def accelerated(socket: str, urls: str) -> dict[str, dict[str, Any]]:
    """Ask for samples through Accelerate; return the keys or the error of each case."""
    from accelerate import Accelerator

    make = partial(ShardDataset, urls, socket=socket, batch_size=5, decode=number)
    Accelerator(cpu=True)
    everything = {"rank": 0, "world_size": 1}
    cases: dict[str, Callable[[], list[int]]] = {
        "sharded, with a worker": lambda: prepared(make(), num_workers=1),
        "dispatched": lambda: prepared(make(), dispatch=True),
        "dispatched, spawned": lambda: prepared(
            make(), dispatch=True, num_workers=1, multiprocessing_context="spawn"
        ),
        "every rank reads all, dispatched": lambda: prepared(
            make(**everything), dispatch=True, num_workers=1
        ),
        "not prepared, gathered": lambda: gathered(make()),
    }
    told: dict[str, dict[str, Any]] = {name: {"keys": [], "error": None} for name in cases}
    for name, case in cases.items():
        try:
            told[name]["keys"] = case()
        except ConfigError as exn:
            told[name]["error"] = str(exn)
    return told


def number(sample: dict[str, Any]) -> torch.Tensor:
    """Return the number of a sample: a dispatcher sends tensors alone."""
    return torch.tensor(int(sample["__key__"]))


def prepared(dataset: ShardDataset, *, dispatch: bool = False, **options: Any) -> list[int]:
    """Read an epoch through `accelerator.prepare`."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    return [
        int(number)
        for batch in accelerator.prepare(DataLoader(dataset, 5, **options))
        for number in batch
    ]


def gathered(dataset: ShardDataset) -> list[int]:
    """Read an epoch by a loader outside `accelerator.prepare`, and gather it like metrics."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return [
        int(each)
        for batch in DataLoader(dataset, 7)
        for each in accelerator.gather_for_metrics(batch)
    ]
