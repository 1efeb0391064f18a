"""Runs the checks: side by side what only looks, one after another what measures; reports in a fixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shardcache.cache.origin_probe.findings import Finding, State, failed, of_error
from shardcache.cli.doctor import config, daemon, door, folder, kernel, room, speed, stores
from shardcache.cli.doctor.case import Case
from shardcache.errors import ShardcacheError


@dataclass(frozen=True, slots=True)
class Check:
    """Some findings that belong together.

    Attributes:
        doing: what people read while it runs.
        run: looks, and returns findings; raises ShardcacheError or OSError where it could not look.
        measures: whether other work on the node would falsify it.
        asks_network: whether it limits its own time, by the number of stores.
    """

    doing: str
    run: Callable[[Case], Awaitable[Sequence[Finding]]]
    measures: bool = False
    asks_network: bool = False


CHECKS = (
    Check("the socket", door.examine),
    Check("the daemon", daemon.examine),
    Check("the options", config.examine),
    Check("the cache folder", folder.examine),
    Check("free space", room.examine),
    Check("the disk's speed", speed.examine, measures=True),
    Check("the kernel's limits", kernel.examine),
    Check("the stores", stores.examine, measures=True, asks_network=True),
)

# Whatever looks has its own, shorter ones for the network; past this a disk, or a file system's server, hangs.
_LIMIT_S = 60.0

Began = Callable[[str], object]


async def examine(
    case: Case, began: Began, checks: Sequence[Check] = CHECKS, *, limit_s: float = _LIMIT_S
) -> list[Finding]:
    """Return every finding, in the order of the checks; `began` is told what is being looked at.

    A check of the node that takes longer than the limit is given up.
    """

    async def run(check: Check) -> Sequence[Finding]:
        began(check.doing)
        return await _run(check, case, limit_s)

    async with asyncio.TaskGroup() as group:
        looking = {check: group.create_task(run(check)) for check in checks if not check.measures}
    measured = {check: await run(check) for check in checks if check.measures}
    found = {check: task.result() for check, task in looking.items()} | measured
    return [finding for check in checks for finding in found[check]]


async def _run(check: Check, case: Case, limit_s: float) -> Sequence[Finding]:
    name, found = f"doctor.{check.doing.split()[-1]}", f"{check.doing} could not be looked at"
    try:
        async with asyncio.timeout(None if check.asks_network else limit_s):
            return await check.run(case)
    except TimeoutError:
        cause = f"no answer within {limit_s:g} s: a disk, or the server of a network file system, hangs"
        return [failed(name, found, cause, "dmesg | tail -50; mount -t nfs,nfs4,cifs,fuse,lustre")]
    except ShardcacheError as exn:
        return [of_error(name, exn)]
    except OSError as exn:
        cause = f"{exn.filename}: {exn.strerror}" if exn.filename else str(exn)
        return [failed(name, found, cause, "sudo shardcache doctor")]


def count(findings: Sequence[Finding], state: State) -> int:
    """Return how many findings are so bad."""
    return sum(finding.state is state for finding in findings)
