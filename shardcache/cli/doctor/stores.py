"""Checks of the object stores, by the daemon with its credentials; if none runs, by this process with the user's."""

from __future__ import annotations

import os
from functools import partial

from shardcache.access.rules import AllowList, Peer
from shardcache.cache.operations.origin_probe.findings import Finding, of_error, skipped
from shardcache.cache.operations.origin_probe.targets import targets
from shardcache.cache.operations.origin_probe.trial import Trial
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.doctor.context import Context
from shardcache.cli.doctor.paths import me
from shardcache.cli.event_loop import in_thread
from shardcache.config import Settings
from shardcache.errors import ProtocolError, ShardcacheError
from shardcache.origin.registry import Origins


async def probe(context: Context) -> list[Finding]:
    """Probe the targets one by one: concurrent measurements would share the bandwidth."""
    if context.status is not None:
        findings = await in_thread(partial(_by_daemon, context, context.status["version"]))
    elif context.settings is not None:
        findings = await _by_this_process(context, context.settings)
    else:
        findings = [skipped("without valid options, object stores cannot be probed as the daemon would")]
    return findings or [skipped("nothing to probe: no url given, nothing cached, no [[origin]] table; add a URL")]


def _by_daemon(context: Context, version: str) -> list[Finding]:
    findings: list[Finding] = []
    try:
        rows = AdminClient(context.socket).probe(list(context.urls), quick=context.quick)
        findings.extend(map(Finding.from_json, rows))
    except ProtocolError:
        findings.append(skipped(f"the running daemon ({version}) cannot probe object stores"))
    except ShardcacheError as exn:
        findings.append(of_error(exn, "the daemon refuses it").named("origin.reach", exn.url or ""))
    return findings


async def _by_this_process(context: Context, settings: Settings) -> list[Finding]:
    allow = AllowList(settings.allow)
    origins = Origins(settings.origin, max_connections=settings.max_connections, redirect_guard=allow)
    peer = Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))
    trial = Trial(settings, origins, allow, peer, f"{me()}'s own, as no daemon answers", context.quick)
    try:
        found = targets(context.urls, settings.origin)
        return [finding for target in found async for finding in trial.findings(target)]
    finally:
        await origins.close()
