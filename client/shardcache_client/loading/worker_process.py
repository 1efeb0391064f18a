"""The process of a DataLoader's worker: its end, and the memory that it keeps.

The trainer is the process that runs the training loop and has started the worker. A worker's
process ends with the trainer's process, or when the loader ends it.
"""

import ctypes
import os
import platform
import select
from collections.abc import Iterator, Mapping
from functools import cache
from multiprocessing import parent_process
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

from shardcache_client.ranks.torch_group import in_worker
from shardcache_client.sharing.buffer import Buffer, collate_buffers

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

TUNE_MALLOC_ENV = "SHARDCACHE_TUNE_MALLOC"
"""Environment variable; 0 disables tuning of the allocator."""

_MIB = 1024 * 1024

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

# glibc returns free memory at the top of the heap to the kernel if it is more than this. The
# default is 128 KiB, or twice the size of the largest mapped block freed so far. A batch is larger,
# so all pages of each batch would be faulted in again, which takes longer than copying the batch.
_MAX_KEPT_BYTES = 128 * _MIB

# Number of free bytes that glibc keeps when it returns the others. It must be well below 64 MiB,
# the size of the segments of other threads' heaps: glibc removes a free segment only if this much
# is free in the previous segment, so with 64 MiB such heaps would never shrink.
_KEPT_BY_TRIM_BYTES = 16 * _MIB

# glibc maps each block of at least this size by itself, and returns it to the kernel when it is
# freed. By default, glibc adjusts this size, starting at 128 KiB. Setting the other two parameters
# ends the adjustment, so this one is set to its upper limit.
_MIN_MAPPED_BYTES = 32 * _MIB

# Environment variables by which users set these parameters themselves.
_GLIBC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
)


def prepare_process(handover: "Handover | None") -> None:
    """Prepare this process, which may be a worker, for reading samples.

    Args:
        handover: passes samples on to the trainer; None if they stay in this process.
    """
    if in_worker():
        end_with_trainer()
        keep_freed_memory()
    if handover is None:
        return
    # torch documents this map as the way to extend `default_collate`. Each process has its own map.
    default_collate_fn_map[Buffer] = collate_buffers
    if not in_worker():
        handover.acks.receive_here()


@cache  # done once in each process
def end_with_trainer() -> None:
    """End this worker's process as soon as its trainer has ended, even by SIGKILL.

    torch checks for the trainer's end only between two batches. A worker may be blocked because its
    batches fill the pipe to the dead trainer. It would stay for ever, because its siblings hold the
    other end of the pipe. Its leases, and the sockets that it has inherited, would stay as well.
    """
    trainer = parent_process()
    if trainer is None or trainer.pid is None:
        return
    if not hasattr(os, "pidfd_open"):
        return
    try:
        pidfd = os.pidfd_open(trainer.pid)
    except ProcessLookupError:
        os._exit(1)  # the trainer has ended already
    except OSError:
        return  # this kernel or sandbox has no pidfds
    watch = Thread(target=_exit_after, args=(pidfd,), name="shardcache-trainer", daemon=True)
    watch.start()


def _exit_after(pidfd: int) -> None:
    """Wait until a process has ended, then end this one."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()  # a pidfd is readable once its process has ended
    os._exit(1)


@cache  # done once in each process
def keep_freed_memory() -> None:
    """Let this process keep up to 128 MiB of freed memory, if its C library is glibc.

    No-op with other C libraries, with SHARDCACHE_TUNE_MALLOC=0, and if the environment sets glibc's
    parameters.
    """
    library, _ = platform.libc_ver()
    if library != "glibc" or not may_tune_malloc(os.environ):
        return

    mallopt = ctypes.CDLL(None).mallopt  # None: the libraries that this process has loaded
    mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES)
    mallopt(_M_TOP_PAD, _KEPT_BY_TRIM_BYTES)


def may_tune_malloc(env: Mapping[str, str]) -> bool:
    """Return True unless the environment disables tuning or sets glibc's parameters itself."""
    if env.get(TUNE_MALLOC_ENV) == "0":
        return False
    if "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
        return False
    return not any(name in env for name in _GLIBC_VARIABLES)


# torch sends the workers the order to end over these queues. If the loader is in a reference cycle,
# the garbage collector may close the queues before that. torch would then wait up to 5 s for each
# worker to find out. A reference to the queues from here keeps them open.
_queues_of_workers: WeakKeyDictionary[Iterator[Any], Any] = WeakKeyDictionary()


def keep_queues_open(iteration: Iterator[Any]) -> None:
    """Keep the queues to the workers of a DataLoader's iteration open, if there are workers."""
    queues = getattr(iteration, "_index_queues", None)
    if queues is not None:
        _queues_of_workers[iteration] = queues


def end_workers(loader: DataLoader[Any], iteration: Iterator[Any] | None) -> None:
    """End the workers of an iteration that failed, or is done.

    Without this, the workers of a failed iteration would run until the error is collected, because
    the error's traceback refers to the iteration.

    Args:
        loader: the DataLoader that started the workers.
        iteration: the iteration; None if it has not begun.
    """
    # A DataLoader with persistent workers keeps the iteration, to use it again.
    loader._iterator = None  # noqa: SLF001

    shut_down = getattr(iteration, "_shutdown_workers", None)
    if shut_down is not None:  # an iteration without it has no workers
        shut_down()
