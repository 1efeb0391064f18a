"""The table of checks, and the runner: inspections concurrently, measurements one by one, findings in table order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardcache.cli.doctor import cache, kernel, stores
from shardcache.cli.doctor import running_daemon as daemon
from shardcache.cli.doctor import tier_owners as tier
from shardcache.cli.doctor.context import Context
from shardcache.cli.doctor.findings import Finding, failed, of_error
from shardcache.cli.event_loop import in_thread
from shardcache.errors import ShardcacheError

Outcome = Finding | Sequence[Finding] | None


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table.

    Attributes:
        name: name of its findings, `family.check`; a finding with a name of its own keeps it.
        looks_at: the thing it examines. Checks of one thing run one after another; if one of them cannot be carried
            out, one finding says so for all.
        run: the check. Runs in a thread, and is abandoned if it takes too long; a coroutine that it returns is awaited
            without a time limit. Raises ShardcacheError or OSError if it cannot be carried out.
        measures: True if other work on the node would distort its measurements.
    """

    name: str
    looks_at: str
    run: Callable[[Context], Outcome | Awaitable[Outcome]]
    measures: bool = False


CHECKS = (
    Check("socket.path", "the socket", daemon.path),
    Check("socket.daemon", "the socket", daemon.listener),
    Check("daemon.version", "the daemon", daemon.version),
    Check("daemon.health", "the daemon", daemon.health),
    Check("config.file", "the options", daemon.config_file),
    Check("config.environment", "the options", daemon.unknown_options),
    Check("config.environment", "the options", daemon.differing_variables),
    Check("cache.folder", "the cache folder", cache.folder),
    Check("cache.format", "the cache folder", cache.folder_format),
    Check("cache.filesystem", "the cache folder", cache.filesystem),
    Check("cache.holder", "the cache folder", cache.holder),
    Check("cache.space", "free space", cache.space),
    Check("cache.inodes", "free space", cache.inodes),
    Check("disk.write", "the disk's speed", cache.speed, measures=True),
    Check("kernel.open_files", "the kernel's limits", kernel.open_files),
    Check("kernel.mappings", "the kernel's limits", kernel.mappings),
    Check("kernel.shared_memory", "the kernel's limits", kernel.shared_memory),
    Check("kernel.memory", "the kernel's limits", kernel.memory),
    Check("tier.bypass", "the cluster's tier", tier.bypasses),
    Check("tier.reach", "the cluster's tier", tier.reach),
    Check("origin.reach", "the object stores", stores.probe, measures=True),
)

# Checks have their own, shorter network timeouts; past this limit a disk or a network filesystem's server hangs.
_LIMIT_S = 60.0

Began = Callable[[str], object]


async def examine(
    context: Context, began: Began, checks: Sequence[Check] = CHECKS, *, limit_s: float = _LIMIT_S
) -> list[Finding]:
    """Return all findings in the order of the checks; `began` is called with each thing that is looked at.

    A check that blocks for longer than `limit_s` is abandoned.
    """
    things: dict[str, list[Check]] = {}
    for check in checks:
        things.setdefault(check.looks_at, []).append(check)
    found: dict[str, list[Finding]] = {}

    async def run(thing: str) -> None:
        began(thing)
        found[thing] = await _run(thing, things[thing], context, limit_s)

    async with asyncio.TaskGroup() as group:
        for thing, rows in things.items():
            if not rows[0].measures:
                group.create_task(run(thing))
    for thing in [thing for thing in things if thing not in found]:
        await run(thing)
    return [finding for thing in things for finding in found[thing]]


async def _run(thing: str, checks: Sequence[Check], context: Context, limit_s: float) -> list[Finding]:
    name, found = f"doctor.{thing.split()[-1]}", f"{thing} could not be checked"
    try:
        return [finding.named(check.name) for check in checks for finding in await _findings(check, context, limit_s)]
    except TimeoutError:
        cause = f"no answer within {limit_s:g} s: a disk or the server of a network filesystem hangs"
        finding = failed(found, cause, "dmesg | tail -50; mount -t nfs,nfs4,cifs,fuse,lustre")
    except ShardcacheError as exn:
        finding = of_error(exn)
    except OSError as exn:
        cause = f"{exn.filename}: {exn.strerror}" if exn.filename else str(exn)
        finding = failed(found, cause, "sudo shardcache doctor")
    return [finding.named(name)]


async def _findings(check: Check, context: Context, limit_s: float) -> Sequence[Finding]:
    async with asyncio.timeout(limit_s):
        outcome = await in_thread(partial(check.run, context))
    if isinstance(outcome, Awaitable):
        outcome = await outcome
    if isinstance(outcome, Finding):
        return [outcome]
    return outcome or ()
