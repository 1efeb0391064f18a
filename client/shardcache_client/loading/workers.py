"""The workers of a loader, which make the parts of a rank's work.

A part is a batch, or a chunk of samples from which this process makes batches. A task describes
what a rank has to make in one iteration. Workers are threads or processes; with a count of 0, the
thread that iterates makes the parts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from shardcache_client.batches.maker import MadePart
from shardcache_client.batches.rank_work import BatchForm, RankWork, Reading, unchanged
from shardcache_client.loading.processes import ProcessPool
from shardcache_client.loading.tasks import BatchTask, Task
from shardcache_client.loading.worker_choice import WorkerChoice

# Options of a loader that are not passed on to the DataLoader that starts the worker processes.
_OWN_OPTIONS = ("batch_size", "drop_last", "workers", "in_order")
# Default number of parts that each worker makes ahead; a DataLoader's default is the same.
_DEFAULT_PREFETCH = 2


def _prepare_thread(device: int | None) -> None:
    """Prepare a thread that makes batches.

    A DataLoader prepares a worker, or its pinning thread, in the same way.

    Args:
        device: index of the accelerator that the training thread uses; None if the thread does not
            pin memory.
    """
    torch.set_num_threads(1)  # the other cores are for the other threads that make batches
    if device is not None:
        # Without this, pinning memory would initialise the first device of the node on every rank.
        torch.accelerator.set_device_index(device)


class Workers:
    """Makes the parts of one task after another.

    Args:
        reading: has what is needed to read the dataset.
        form: the form of the batches.
        loader_name: name of the loader, under which the daemon groups worker processes.
        options: the options of `ShardDataset.loader`, with defaults filled in.
        choice: the choice of the kind of workers.

    Attributes:
        deal: division among the ranks of the samples that parts are made of.
        count: number of workers; 0 if the thread that iterates makes the parts.
    """

    def __init__(
        self,
        reading: Reading,
        form: BatchForm,
        loader_name: str,
        options: Mapping[str, Any],
        choice: WorkerChoice,
    ) -> None:
        self.deal = reading.deal
        self.count: int = options["num_workers"]
        self._ahead = options.get("prefetch_factor") or _DEFAULT_PREFETCH
        self._pins_memory = bool(options["pin_memory"]) and torch.accelerator.is_available()
        self._choice = choice
        self._pool: ProcessPool | None = None  # None once threads make the parts
        if self.count and choice.kind != "threads":
            process_options = {
                name: value for name, value in options.items() if name not in _OWN_OPTIONS
            }
            self._pool = ProcessPool(reading, form, loader_name, process_options)

    @property
    def are_of_this_process(self) -> bool:
        """False in a fork of the process that made this object, if there are worker processes."""
        return self._pool is None or self._pool.is_of_this_process

    def parts(self, task: Task, work: RankWork, start: int) -> Generator[MadePart]:
        """Yield the parts of a task from number `start` on; batches are pinned if that is wanted.

        Args:
            task: describes the work to worker processes.
            work: the same work, for threads of this process.
            start: number of the first part.

        Raises any error of making the parts, and torch's errors about dead processes.
        """
        # The choice may have been made since the last task.
        if self._choice.kind == "threads":
            self._pool = None
        taken = 0
        if self._pool is not None:
            numbers = range(start, work.count)
            with closing(self._made_by_processes(self._pool, task, numbers)) as parts:
                for part in parts:
                    taken += 1
                    yield part

        # Threads make all parts; or the rest of them if threads were chosen during the task, which
        # makes `_made_by_processes` remove the pool.
        if self._pool is None:
            # The memory of chunks is not pinned, as batches are still to be made of them.
            finish = self._pinned_part if isinstance(task, BatchTask) else unchanged
            yield from work.parts(
                start=start + taken,
                threads=self.count,
                ahead=self._ahead,
                begin=self.thread_preparation(),
                finish=finish,
            )

    def _made_by_processes(
        self,
        pool: ProcessPool,
        task: Task,
        numbers: range,
    ) -> Generator[MadePart]:
        """Yield the parts that worker processes make.

        If threads are chosen in the meantime, the parts end early, and the pool is removed.
        """
        choice = self._choice
        with closing(pool.parts(task, numbers, is_watched=choice.is_open)) as sent_parts:
            for sent in sent_parts:
                choice.note_making(sent.lock_use)
                if choice.kind == "threads":
                    pool.retire()
                yield sent.part
        if choice.kind == "threads":
            self._pool = None

    def thread_preparation(self) -> Callable[[], None]:
        """Return the function that a thread has to call before it makes batches.

        Must be called by the training thread, whose accelerator the other threads will use.
        """
        if not self._pins_memory:
            return partial(_prepare_thread, device=None)
        return partial(_prepare_thread, device=torch.accelerator.current_device_index())

    def pinned(self, batch: Any) -> Any:
        """Return a batch made by this process, copied to pinned memory if that is wanted."""
        if not self._pins_memory:
            return batch
        return pin_memory(batch)  # type: ignore[no-untyped-call]

    def _pinned_part(self, part: MadePart) -> MadePart:
        """Return a part with its batch in pinned memory, if that is wanted."""
        return part._replace(content=self.pinned(part.content))
