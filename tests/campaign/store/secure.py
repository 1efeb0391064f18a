"""A store behind TLS: certificates to be refused, connections cut within a record, redirects to plain HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from campaign.result import Result
from campaign.store.place import PART, Failure, StorePlace
from shardcache.errors import OriginUnavailableError
from support.network.certificates import Authority
from support.network.scripted_server import ScriptedServer, answer
from support.network.secure_front import SecureFront, cut, redirected

Present: TypeAlias = Callable[[ssl.SSLContext], object]
"""Changes a server's certificate."""

_PASSED = timedelta(days=-1)


def behind_tls(place: StorePlace, folder: Path, least: int) -> Iterator[Result]:
    """Yield a result for each kind of certificate that is not to be trusted, then for cuts and for redirects."""
    trusted, unknown = Authority(folder / "trusted"), Authority(folder / "unknown")
    presented: dict[str, Present] = {
        "a certificate of an unknown authority": lambda context: unknown.server(context=context),
        "a certificate that has expired": lambda context: trusted.server(lifetime=_PASSED, context=context),
        "a certificate for another name": lambda context: trusted.server("store.example", context=context),
    }
    with place.behind_tls(trusted) as front:
        place.recover(begun := Result(PART, "nothing"), place.read(begun))
        for fault, present in presented.items():
            yield _refused(place, front, fault, present, lambda context: trusted.server(context=context), least)
        yield _cut(place, front, least)
        yield _led_away(place, front, least)


def _refused(place: StorePlace, front: SecureFront, fault: str, present: Present, mend: Present, least: int) -> Result:
    """Present a certificate that is not to be trusted: nothing is asked, and the errors say why."""
    result, before = Result(PART, fault), front.refused
    while result.injected < least:
        place.evict()
        present(front.context)
        front.hang_up()
        asked = len(front.heads)
        failures = _none_comes(place, result)
        if len(front.heads) > asked:
            result.fail("wrong", f"{fault}: requests were sent all the same")
        for failure in failures:
            if isinstance(failure.error, OriginUnavailableError) or "certificate" not in failure.error.message:
                result.fail("untyped", f"{fault}: {failure.error!r}")
        mend(front.context)
        place.recover(result, failures)
        if result.injected == (refused := front.refused - before):
            break  # nothing was refused, which counts as wrong already
        result.injected = refused
    return result


def _cut(place: StorePlace, front: SecureFront, least: int) -> Result:
    """Cut the connection in the middle of a record, once for each request: it is sent again, and every shard comes."""
    result, before = Result(PART, "a connection cut within a TLS record"), front.spoiled
    while result.injected < least:
        for method in ("HEAD", "GET"):
            place.evict()
            front.spoil(cut, method, once=True)
            for failure in place.read(result):
                result.fail("lost", f"{failure.url} failed: {failure.error}")
            front.heal()
        result.injected = front.spoiled - before
    return result


def _led_away(place: StorePlace, front: SecureFront, least: int) -> Result:
    """Redirect to a server of plain HTTP: it is not asked."""
    result, before = Result(PART, "a redirect from https to plain http"), front.spoiled
    with ScriptedServer(answer(b"")) as plain:
        while result.injected < least:
            for method in ("HEAD", "GET"):
                place.evict()
                front.spoil(redirected(plain.url("")), method)
                failures = _none_comes(place, result, listed=method == "HEAD")
                front.heal()
                place.recover(result, failures)
            result.injected = front.spoiled - before
        if plain.connections:
            result.fail("wrong", f"{result.fault}: followed {plain.connections} times")
    return result


def _none_comes(place: StorePlace, result: Result, *, listed: bool = False) -> Sequence[Failure]:
    """Read and list all shards, and return the failures; whatever comes is wrong, a list unless it is `listed`."""
    failures = place.read(result)
    if len(failures) < len(place.urls):
        result.fail("wrong", f"{result.fault}: {len(place.urls) - len(failures)} shards were read")
    if place.list(result) and not listed:
        result.fail("wrong", f"{result.fault}: the shards were listed")
    return failures
