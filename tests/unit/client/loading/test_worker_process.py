"""worker_process.py: freed memory stays with the process, within a configurable limit."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor

import pytest

from shardcache_client.loading.worker_process import keep_freed_memory, may_tune_malloc
from support.programs.processes import MB, glibc_only, kept_bytes


def kept_when_tuned(freed_bytes: int, value_bytes: int) -> int:
    """Return what a process keeps that keeps freed memory."""
    keep_freed_memory()
    return kept_bytes(freed_bytes, value_bytes)


def in_a_process(kept: Callable[[int, int], int], freed_bytes: int, value_bytes: int) -> int:
    """Call a function in a new process, free of what earlier tests released."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(kept, freed_bytes, value_bytes).result()


@glibc_only
@pytest.mark.slow
def test_freed_memory_is_kept_up_to_a_limit() -> None:
    """Of 250 MB at most 128 MiB; by default less than 90 MB of as many."""
    assert in_a_process(kept_bytes, 90 * MB, 100_000) < 70 * MB
    assert 15 * MB < in_a_process(kept_when_tuned, 250 * MB, 1 * MB) < 140 * MB


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, True),
        ({"SHARDCACHE_TUNE_MALLOC": "1", "GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
        ({"SHARDCACHE_TUNE_MALLOC": "0"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.top_pad=65536"}, False),
    ],
)
def test_the_environment_decides(env: Mapping[str, str], wanted: bool) -> None:
    """Parameters that the user has set for glibc stay, and one variable turns the tuning off."""
    assert may_tune_malloc(env) is wanted
