"""Clock check against the object store: S3 refuses requests signed more than 15 minutes off."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

import aiohttp

from shardcache.cache.operations.origin_probe.findings import Finding, failed, ok, skipped, warning
from shardcache.units import duration

_LIMIT = aiohttp.ClientTimeout(total=10)
_S3_TAKES_S = 15 * 60
# A Date header has a resolution of one second, and network latency adds to that.
_IN_STEP_S = 30.0
_REMEDY = "timedatectl set-ntp true   # or: chronyc makestep"


async def clock(server: str, *, signs: bool) -> Finding:
    """Compare the node's clock with a server's, without credentials: any response carries a date.

    Args:
        server: url of the server's root.
        signs: True if requests are signed with the time.
    """
    try:
        async with aiohttp.ClientSession(trust_env=True, timeout=_LIMIT) as http:
            began_s = time.time()
            async with http.head(server, allow_redirects=False) as answer:
                elapsed_s = time.time() - began_s
                date = answer.headers.get("Date", "")
        # Midway between request and answer, and midway through the second that the header names.
        skew_s = began_s + elapsed_s / 2 - (parsedate_to_datetime(date).timestamp() + 0.5)
    except (aiohttp.ClientError, OSError, ValueError) as exn:
        return skipped(f"no usable date from the server ({exn or type(exn).__name__})")
    return _judge(skew_s, signs=signs)


def _judge(skew_s: float, *, signs: bool) -> Finding:
    found = f"{duration(abs(skew_s))} {'ahead of' if skew_s > 0 else 'behind'} the object store"
    figures = {"skew_s": round(skew_s, 1)}
    if abs(skew_s) < _IN_STEP_S:
        return ok("in sync with the object store", figures=figures)
    if signs and abs(skew_s) >= _S3_TAKES_S:
        cause = "S3 refuses requests signed more than 15 minutes off (RequestTimeTooSkewed)"
        return failed(found, cause, _REMEDY, figures=figures)
    cause = "one of the two clocks is wrong; beyond 15 minutes, S3 refuses signed requests"
    return warning(found, cause, _REMEDY, figures=figures)
