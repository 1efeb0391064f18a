"""Human-readable sizes, durations, users and groups."""

import grp
import pwd
from functools import cache

_SIZE_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


def size(value_bytes: float) -> str:
    """Return a size in human-readable form: `12 Bytes`, `1.2 GB`; units are powers of 1,000."""
    if abs(value_bytes) == 1:
        return f"{value_bytes:.0f} Byte"
    if abs(value_bytes) < 1000:
        return f"{int(value_bytes)} Bytes"

    scaled = value_bytes
    for unit in _SIZE_UNITS:
        scaled /= 1000
        text = f"{scaled:.1f} {unit}"
        if abs(round(scaled, 1)) < 1000:
            break
    return text


def duration(value_s: float) -> str:
    """Return a duration in human-readable form: `850 ms`, `3.2 s`, `5 minutes`, `2 hours`."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 60:
        return f"{value_s:.1f} s"

    # From minutes on, numbers are rounded down: a certificate that is valid for six days and some
    # hours is not valid for seven days.
    minutes = int(value_s // 60)
    hours = int(value_s // 3600)
    days = int(value_s // 86_400)
    if minutes < 60:
        return "a minute" if minutes == 1 else f"{minutes} minutes"
    if hours < 24:
        return "an hour" if hours == 1 else f"{hours} hours"
    return "a day" if days == 1 else f"{days:,} days"


def age(value_s: float) -> str:
    """Return the time since an event in human-readable form: `now`, `3.2 s ago`, `a day ago`."""
    if value_s < 1:
        return "now"
    return f"{duration(value_s)} ago"


@cache
def user_name(uid: int) -> str:
    """Return a user's name; the uid if it has no name on this system, as in a container.

    The system may send a request to a directory server, so this may block.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name; the gid if it has no name on this system."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
