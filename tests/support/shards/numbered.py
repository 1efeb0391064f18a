"""A dataset of numbered samples that reads from nowhere, and ranks that train on it in step, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from shardcache_client.lengths import LengthBatches
from shardcache_client.topology import Topology
from support.programs.guard import GUARD_S

Batch = list[dict[str, Any]]


class Numbered(IterableDataset[dict[str, Any]]):
    """Samples `{"__key__": number, "length": ...}`, dealt to readers in equal spans; the rest of them is left out.

    Args:
        lengths: of all samples of all readers.
        reader: which reader this is. Default: the DataLoader's worker, of the rank given by `ranks`.
        skipped: numbers of samples that are passed but not given, as broken ones are.
    """

    seed = 7

    def __init__(
        self,
        lengths: Sequence[int],
        reader: Topology | None = None,
        *,
        ranks: tuple[int, int] = (0, 1),
        skipped: Sequence[int] = (),
    ) -> None:
        self._lengths = lengths
        self._reader = reader
        self._ranks = ranks
        self._skipped = skipped
        self._loaded: list[dict[str, Any]] = []
        self.epoch = 0
        self.position = 0
        self._start()

    def topology(self) -> Topology:
        """Return which reader this is."""
        if self._reader:
            return self._reader
        info = get_worker_info()
        return Topology(*self._ranks, info.id, info.num_workers) if info else Topology(*self._ranks)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of every iteration from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._start()
        return self._samples(self._span(self.topology()))

    def _samples(self, span: list[int]) -> Iterator[dict[str, Any]]:
        for position in range(self.position, len(span)):
            self.position = position + 1
            if span[position] not in self._skipped:
                yield {"__key__": span[position], "length": self._lengths[span[position]]}

    def _span(self, reader: Topology) -> list[int]:
        each = len(self._left) // reader.readers
        return self._left[reader.reader * each : (reader.reader + 1) * each]

    def state_dict(self) -> dict[str, Any]:
        """Return more than few numbers: this dataset is for tests."""
        reader = list(astuple(self.topology()))
        return {"numbered": reader, "epoch": self.epoch, "left": self._left, "position": self.position}

    def load_state_dict(self, state: Any) -> None:
        """Go on from there in the epoch of the state."""
        self._loaded = list(_states(state))
        self.epoch = self._loaded[0]["epoch"]
        self._start()

    def _start(self) -> None:
        self._left, self.position = list(range(len(self._lengths))), 0
        me = self.topology()
        states = {Topology(*state["numbered"]): state for state in self._loaded if state["epoch"] == self.epoch}
        # The state of the same worker of another rank says the same as its own.
        alike = [
            states[reader] for reader in sorted(states, key=lambda it: it != me) if replace(reader, rank=me.rank) == me
        ]
        if alike:
            self._left, self.position = alike[0]["left"], alike[0]["position"]
        elif states:
            self._left = [number for reader, state in states.items() for number in self._rest(reader, state)]

    def _rest(self, reader: Topology, state: dict[str, Any]) -> list[int]:
        self._left, beyond = state["left"], int(state["beyond"] or "0", 16)
        behind = self._span(reader)[state["position"] :]
        return [number for nth, number in enumerate(behind) if not beyond >> nth & 1]


def _states(structure: Any) -> Iterator[dict[str, Any]]:
    if isinstance(structure, dict) and "numbered" in structure:
        yield structure
    elif isinstance(structure, dict | list):
        for part in structure.values() if isinstance(structure, dict) else structure:
            yield from _states(part)


class Table:
    """Where the ranks of one process agree. A rank that waits in vain raises TimeoutError."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._given: dict[str, dict[int, int]] = {}
        self._changed = threading.Condition()

    def seat(self, reader: Topology) -> Seat:
        """Return one reader's way to agree."""
        return Seat(self, reader)

    def greatest(self, rank: int, name: str, value: int) -> int:
        """Return the greatest value under a name once all ranks have given theirs."""
        with self._changed:
            given = self._given.setdefault(name, {})
            given[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(given) == self._world_size, timeout=GUARD_S):
                raise TimeoutError(f"only {sorted(given)} said {name}")
            return max(given.values())


class Seat:
    """One reader at a table."""

    def __init__(self, table: Table, reader: Topology) -> None:
        self._table = table
        self._reader = reader

    def greatest(self, name: str, value: int) -> int:
        """Return the greatest value of the same worker of all ranks."""
        return self._table.greatest(self._reader.rank, f"{name}, worker {self._reader.worker}", value)


def train(ranks: list[list[LengthBatches]], steps: int | None = None) -> list[list[Batch]]:
    """Return the batches of each rank, which takes them from its readers in turn as a DataLoader does.

    No rank takes its next batch before all have this one. Ends after so many steps, or with all ranks' batches; raises
    BrokenBarrierError when a rank has none while another does.
    """
    step = threading.Barrier(len(ranks))

    def rank(readers: list[LengthBatches]) -> list[Batch]:
        taken: list[Batch] = []
        try:
            for batch in islice(_in_turn(readers), steps):
                taken.append(batch)
                step.wait(timeout=GUARD_S)
        except Exception:
            step.abort()
            raise
        return taken

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, ranks))


def _in_turn(readers: list[LengthBatches]) -> Iterator[Batch]:
    going = [iter(reader) for reader in readers]
    while going:
        for each in list(going):
            batch = next(each, None)
            if batch is None:
                going.remove(each)
            else:
                yield batch
