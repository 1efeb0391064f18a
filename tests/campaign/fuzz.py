"""Hostile input: what reads bytes from elsewhere, given more than a million of them, most guided by coverage."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from campaign.result import Result
from fuzz import beside, guided
from fuzz.targets import TARGETS
from support.programs.daemon import Daemon
from support.shards.tars import write_shards

PART = "fuzz"

# Inputs at scale 1, and the seconds they may take; the slow ones first, so that two processors are done together.
_RUNS = {
    "session": (15_000, 240),
    "arriving": (80_000, 120),
    "sidecar": (120_000, 120),
    "answers": (40_000, 120),
    "tar": (350_000, 240),
    "message": (900_000, 300),
}
_AT_ONCE = 2
_SESSIONS = 2_000
_EXAMPLES = 150


def run(scale: float, folder: Path) -> Iterator[Result]:
    """Yield a result for each target, then for a daemon beset by hostile sessions, then for its admin API."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(partial(_guided, scale=scale, folder=folder), _RUNS)
    urls = [f"file://{path}" for path in write_shards(folder, 3, 3)]
    with Daemon(folder, "--allow", f"file://{folder}/", "--log-level", "warning") as daemon:
        yield _beside(daemon, urls, max(10, round(scale * _SESSIONS)))
        yield _api(daemon, max(2, round(scale * _EXAMPLES)))


def _guided(name: str, scale: float, folder: Path) -> Result:
    runs, most_s = _RUNS[name]
    outcome = guided.fuzz(name, max(100, round(scale * runs)), most_s, folder)
    result = Result(PART, TARGETS[name].what, injected=outcome.runs)
    if outcome.kind:
        harm = "wrong" if outcome.broke_promise else "hangs" if outcome.kind == "timeout" else "untyped"
        result.fail(harm, outcome.story)
    return result


def _beside(daemon: Daemon, urls: list[str], sessions: int) -> Result:
    result = Result(PART, "hostile sessions beside a reader")
    try:
        result.injected = beside.play(daemon, urls, sessions)
    except AssertionError as exn:
        result.fail("wrong", str(exn))
    except TimeoutError as exn:
        result.fail("hangs", str(exn))
    return result


def _api(daemon: Daemon, examples: int) -> Result:
    from fuzz import api  # schemathesis takes seconds to import

    result = Result(PART, "any request to the admin API")
    for operation in api.operations(daemon):
        try:
            result.injected += sum(1 for _ in api.examine(daemon, operation, examples))
        except (AssertionError, BaseExceptionGroup) as exn:  # schemathesis's groups are no Exception
            result.fail("wrong", f"{operation.label}: {exn}")
    return result
