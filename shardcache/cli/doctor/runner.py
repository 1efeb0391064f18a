"""Check runner: runs inspections concurrently and measurements one by one; reports in a fixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shardcache.cache.operations.origin_probe.findings import Finding, State, failed, of_error
from shardcache.cli.doctor import config, daemon, folder, kernel, speed
from shardcache.cli.doctor import origins as stores
from shardcache.cli.doctor import socket as door
from shardcache.cli.doctor import space as room
from shardcache.cli.doctor.context import Case
from shardcache.errors import ShardcacheError


@dataclass(frozen=True, slots=True)
class Check:
    """A check that returns related findings.

    Attributes:
        doing: description shown while the check runs.
        run: the check; raises ShardcacheError or OSError if it cannot be carried out.
        measures: True if other work on the node would distort its measurements.
        asks_network: True if it has its own time limit, which depends on the number of origins.
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
    Check("the object stores", stores.examine, measures=True, asks_network=True),
)

# Checks have their own, shorter network timeouts; past this limit a disk or a network filesystem's server hangs.
_LIMIT_S = 60.0

Began = Callable[[str], object]


async def examine(
    case: Case, began: Began, checks: Sequence[Check] = CHECKS, *, limit_s: float = _LIMIT_S
) -> list[Finding]:
    """Return all findings in the order of the checks; `began` is called with the description of each check.

    A check of the node that takes longer than `limit_s` is abandoned.
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
    name, found = f"doctor.{check.doing.split()[-1]}", f"{check.doing} could not be checked"
    try:
        async with asyncio.timeout(None if check.asks_network else limit_s):
            return await check.run(case)
    except TimeoutError:
        cause = f"no answer within {limit_s:g} s: a disk or the server of a network filesystem hangs"
        return [failed(name, found, cause, "dmesg | tail -50; mount -t nfs,nfs4,cifs,fuse,lustre")]
    except ShardcacheError as exn:
        return [of_error(name, exn)]
    except OSError as exn:
        cause = f"{exn.filename}: {exn.strerror}" if exn.filename else str(exn)
        return [failed(name, found, cause, "sudo shardcache doctor")]


def count(findings: Sequence[Finding], state: State) -> int:
    """Return the number of findings in a state."""
    return sum(finding.state is state for finding in findings)
