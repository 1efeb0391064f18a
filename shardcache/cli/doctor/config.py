"""The options: whether they make sense, and whether all that was set is read by anybody."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from shardcache.cache.origin_probe.findings import Finding, failed, ok, skipped, warning
from shardcache.cli.doctor.case import Case
from shardcache.config import unknown_variables

# By these the daemon finds stores, and what it may do there.
_OF_STORES = re.compile(r"SHARDCACHE_|AWS_|GOOGLE_|AZURE_|HF_|(?:https?|all|no)_proxy$", re.IGNORECASE)


async def examine(case: Case) -> list[Finding]:
    """Look at the config file and at both environments: this one and the daemon's."""
    return [_file(case), *_unread(), *_differing(case)]


def _file(case: Case) -> Finding:
    name = "config.file"
    if case.config_is_kept:
        return skipped(name, f"{case.config} is not for you to read; what it says is not looked at")
    if case.config_error is not None:
        return failed(name, case.config_error.message, "the daemon does not start with it", case.config_error.remedy)
    if case.config.is_file():
        return ok(name, f"{case.config} makes sense")
    return ok(name, f"no file at {case.config}: options come from flags and environment alone")


def _unread() -> Iterator[Finding]:
    for name, meant in unknown_variables():
        remedy = f'export {meant}="${name}"; unset {name}' if meant else f"unset {name}"
        yield warning("config.environment", f"{name} is set", "nothing reads a variable of that name", remedy)


def _differing(case: Case) -> Iterator[Finding]:
    """Name variables whose values differ; the values may be secrets."""
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
        found = f"the daemon's environment has other values than yours: {', '.join(names)}; the daemon's count"
        yield ok("config.environment", found)


def _environment(pid: int) -> dict[str, str] | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it is for the daemon's user and root
        return None
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
