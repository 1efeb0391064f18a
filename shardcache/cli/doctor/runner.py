"""The table of checks, and its runner."""

from asyncio import timeout
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from shardcache.cli.common import in_thread
from shardcache.cli.doctor import node, stores
from shardcache.cli.doctor.context import Context, Finding, failed, of_error
from shardcache.errors import ShardcacheError

Outcome = Finding | Sequence[Finding] | None
Check = tuple[str, Callable[[Context], Outcome | Awaitable[Outcome]]]
"""The name of its findings, `family.check`, and the check, which runs in a thread.

A coroutine that the check returns is awaited without a time limit. Raises ShardcacheError or OSError if it cannot be
carried out.
"""

CHECKS: Sequence[Check] = (
    ("socket.path", node.socket_place),
    ("socket.daemon", node.listener),
    ("daemon.health", node.health),
    ("config.file", node.options),
    ("config.environment", node.environment),
    ("cache.folder", node.folder),
    ("cache.format", node.folder_format),
    ("cache.filesystem", node.filesystem),
    ("cache.space", node.space),
    ("disk.write", node.speed),
    ("kernel.open_files", node.open_files),
    ("kernel.shared_memory", node.shared_memory),
    ("tier.bypass", stores.tier_bypasses),
    ("tier.reach", stores.tier_reach),
    ("origin.reach", stores.probe),
)

# Checks have their own, shorter network timeouts; past this limit a disk or a network filesystem's server hangs.
_LIMIT_S = 30.0


async def examine(context: Context, checks: Sequence[Check] = CHECKS, *, limit_s: float = _LIMIT_S) -> list[Finding]:
    """Return all findings. A check that blocks for longer than `limit_s` is abandoned.

    The rest of a family is skipped if one of it cannot be carried out: one finding says so for all.
    """
    findings: list[Finding] = []
    given_up = set()
    for name, check in checks:
        family = name.partition(".")[0]
        if family in given_up:
            continue
        try:
            async with timeout(limit_s):
                outcome = await in_thread(partial(check, context))
            if isinstance(outcome, Awaitable):
                outcome = await outcome
            found = [outcome] if isinstance(outcome, Finding) else outcome or ()
            findings += [finding.named(name) for finding in found]
        except (TimeoutError, ShardcacheError, OSError) as exn:
            given_up.add(family)
            findings.append(_not_done(family, exn, limit_s).named(f"doctor.{family}"))
    return findings


def _not_done(family: str, error: Exception, limit_s: float) -> Finding:
    found = f"the {family} could not be checked"
    if isinstance(error, ShardcacheError):
        return of_error(error)
    if isinstance(error, TimeoutError):
        cause = f"no answer within {limit_s:g} s: a disk or the server of a network filesystem hangs"
        return failed(found, cause, "dmesg | tail -50; mount -t nfs,nfs4,cifs,fuse,lustre")
    return failed(found, str(error), "sudo shardcache doctor")
