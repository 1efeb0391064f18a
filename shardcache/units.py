"""Human-readable sizes, durations, users and groups."""

import grp
import pwd
from functools import cache

import humanize


def size(value_bytes: float) -> str:
    """Return a size in human-readable form: `1.2 GB`."""
    return humanize.naturalsize(value_bytes)


def duration(value_s: float) -> str:
    """Return a duration in human-readable form: `850 ms`, `3.2 s`, `5 minutes`, `2 hours`."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 60:
        return f"{value_s:.1f} s"
    return humanize.naturaldelta(value_s)


@cache
def user_name(uid: int) -> str:
    """Return a user's name; the uid if it has none here, as in a container. May ask a directory server."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name; the gid if it has none here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
