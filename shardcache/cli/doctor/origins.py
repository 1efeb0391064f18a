"""Checks of the object stores, by the daemon with its credentials; if none runs, by this process with the user's."""

from __future__ import annotations

import os

from shardcache.access.rules import AllowList, Peer
from shardcache.cache.operations.origin_probe.findings import Finding, of_error, skipped
from shardcache.cache.operations.origin_probe.targets import targets
from shardcache.cache.operations.origin_probe.trial import Trial
from shardcache.cli.client import AdminClient
from shardcache.cli.doctor.context import Case, Running
from shardcache.cli.doctor.users import me
from shardcache.config import Settings
from shardcache.errors import ProtocolError, ShardcacheError
from shardcache.origin.registry import Origins

_NAME = "store.reach"
_NOTHING = "nothing to probe: no url given, nothing cached, no [[origin]] table; add a URL"


async def examine(case: Case) -> list[Finding]:
    """Probe the targets one by one: concurrent measurements would share the bandwidth."""
    if case.running is not None:
        return await _by_daemon(case, case.running) or [skipped(_NAME, _NOTHING)]
    if case.settings is None:
        return [skipped(_NAME, "without valid options, object stores cannot be probed as the daemon would")]
    return await _by_this_process(case, case.settings) or [skipped(_NAME, _NOTHING)]


async def _by_daemon(case: Case, running: Running) -> list[Finding]:
    findings: list[Finding] = []
    try:
        async with AdminClient(case.socket) as daemon:
            findings += [Finding.from_json(row) async for row in daemon.probe(list(case.urls), quick=case.quick)]
    except ProtocolError:
        findings.append(skipped(_NAME, f"the running daemon ({running.page['version']}) cannot probe object stores"))
    except ShardcacheError as exn:
        findings.append(of_error(_NAME, exn, "the daemon refuses it", subject=exn.url or ""))
    return findings


async def _by_this_process(case: Case, settings: Settings) -> list[Finding]:
    allow = AllowList(settings.allow)
    origins = Origins(settings.origin, max_connections=settings.max_connections, redirect_guard=allow)
    peer = Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))
    trial = Trial(settings, origins, allow, peer, f"{me()}'s own, as no daemon answers", case.quick)
    try:
        found = targets(case.urls, settings.origin)
        return [finding for target in found async for finding in trial.findings(target)]
    finally:
        await origins.close()
