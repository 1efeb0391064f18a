"""Checks of the options: their validity, unknown variables, and differences from the daemon's environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, skipped, warning
from shardcache.cli.doctor.context import Case
from shardcache.config import unknown_variables

# Variables that select object stores, credentials and proxies.
_OF_STORES = re.compile(r"SHARDCACHE_|AWS_|GOOGLE_|AZURE_|HF_|(?:https?|all|no)_proxy$", re.IGNORECASE)


async def examine(case: Case) -> list[Finding]:
    """Check the config file and both environments: this one and the daemon's."""
    return [_file(case), *_unread(), *_differing(case)]


def _file(case: Case) -> Finding:
    name = "config.file"
    if case.config_is_kept:
        return skipped(name, f"you may not read {case.config}; its contents are not checked")
    if case.config_error is not None:
        return failed(name, case.config_error.message, "the daemon does not start with it", case.config_error.remedy)
    if case.config.is_file():
        return ok(name, f"{case.config} is valid")
    return ok(name, f"no file at {case.config}: options come only from flags and environment")


def _unread() -> Iterator[Finding]:
    for name, meant in unknown_variables():
        remedy = f'export {meant}="${name}"; unset {name}' if meant else f"unset {name}"
        yield warning("config.environment", f"{name} is set", "no such option exists: the variable is ignored", remedy)


def _differing(case: Case) -> Iterator[Finding]:
    """List the variables that differ, without their values, which may be secrets."""
    running = case.running
    theirs = None if running is None or running.pid is None else _environment(running.pid)
    if running is None or theirs is None:
        return
    names = sorted(
        name
        for name in theirs.keys() | os.environ.keys()
        if _OF_STORES.match(name) and theirs.get(name) != os.environ.get(name)
    )
    if names:
        found = f"these variables differ between the daemon and you: {', '.join(names)}; the daemon's apply"
        yield ok("config.environment", found)


def _environment(pid: int) -> dict[str, str] | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # readable only by the daemon's user and root
        return None
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
