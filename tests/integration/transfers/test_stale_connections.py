"""Connections that died without a word, and addresses that nobody answers at."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shardcache.origin.base import Origin
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import nothing
from shardcache.transport.http.pool import SILENCE_S
from support.network.lead import SILENT, lead, silent_address
from support.programs.daemon import eventually
from support.stores.buckets import Bucket, read_range, use_aws
from support.stores.faulty_proxy import FaultyProxy
from support.stores.mischief import Mischief

DATA = bytes(range(256)) * 400
CONNECTIONS = 4
NAME = "store"


@pytest.fixture
def proxy(moto: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """A proxy before a store; this process's AWS variables point at the proxy."""
    with FaultyProxy(moto.env()["AWS_ENDPOINT_URL"]) as proxy:
        use_aws(monkeypatch, tmp_path, proxy.env(moto.env()))
        yield proxy


class Questions:
    """Ways to ask for an object: what it is, all of it, and the list of its folder."""

    def __init__(self, bucket: Bucket, endpoint_url: str, origins: Origins) -> None:
        url = bucket.put("a.tar", DATA, ACL="public-read")
        store = origins.origin(url)
        self.web_url = f"{endpoint_url}/{bucket.name}/a.tar"
        self.web = origins.origin(self.web_url)
        self.by_worker = partial(store.stat, url)
        self.by_sdk = partial(store.list_prefix, f"{bucket.url}/", nothing)
        reads = (partial(_read, store, url), partial(_read, self.web, self.web_url))
        self.all = (self.by_worker, self.by_sdk, *reads, partial(self.web.stat, self.web_url))


async def _read(origin: Origin, url: str) -> object:
    return await read_range(origin, await origin.stat(url), 0, len(DATA))


async def ask(*questions: Callable[[], Awaitable[object]]) -> list[object]:
    """Ask each question several times at once, so that several connections are open."""
    return await asyncio.gather(*(question() for question in questions for _ in range(CONNECTIONS)))


@pytest.mark.slow
async def test_connections_that_died_silently_cost_one_wait(
    moto: Bucket, proxy: FaultyProxy, origins: Origins
) -> None:
    """Each question is answered at its first try, though idle connections swallow data."""
    asked = Questions(moto, proxy.endpoint_url, origins).all
    wanted = await ask(*asked)
    assert proxy.forget() > CONNECTIONS
    assert await ask(*asked) == wanted
    swallowed = proxy.swallowed
    assert swallowed > CONNECTIONS
    assert await ask(*asked) == wanted
    assert proxy.swallowed == swallowed  # those that nobody tried are not trusted either


async def test_a_request_without_an_answer_is_repeated_over_a_new_connection(
    moto: Bucket, proxy: FaultyProxy, origins: Origins
) -> None:
    """A caller that gives up gets its answer at the second try."""
    questions = Questions(moto, proxy.endpoint_url, origins)
    asked = (questions.by_worker, questions.by_sdk)
    wanted = await ask(*asked)
    assert proxy.forget() > CONNECTIONS
    for number, question in enumerate(asked, start=1):
        task = asyncio.ensure_future(question())
        await asyncio.to_thread(eventually, partial(has_swallowed, proxy, number))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert proxy.swallowed == len(asked)
    assert await ask(*asked) == wanted
    assert proxy.swallowed == len(asked)


def has_swallowed(proxy: FaultyProxy, requests: int) -> bool:
    """Return whether as many requests were sent over dead connections."""
    return proxy.swallowed >= requests


@pytest.mark.slow
async def test_the_slower_of_two_requests_casts_no_doubt(
    moto: Bucket, proxy: FaultyProxy, origins: Origins
) -> None:
    """Idle connections that answer others stay in use after one question is given up."""
    questions = Questions(moto, proxy.endpoint_url, origins)
    origin = questions.web
    url = questions.web_url
    obj = await origin.stat(url)
    await asyncio.gather(*(origin.stat(url) for _ in range(CONNECTIONS)))
    proxy.fail(Mischief.SILENCE, start=1, times=1)
    async with asyncio.timeout(SILENCE_S):
        late = asyncio.create_task(read_range(origin, obj, 1, 2))
        while not proxy.done[Mischief.SILENCE]:
            await origin.stat(url)
        await origin.stat(url)
    late.cancel()
    await asyncio.wait([late])
    connections = proxy.connections
    await origin.stat(url)
    assert proxy.connections == connections


@pytest.mark.slow
async def test_a_silent_first_address_is_passed_over(
    moto: Bucket, proxy: FaultyProxy, origins: Origins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose first address takes no connection is asked at its second."""
    port = urlsplit(proxy.endpoint_url).port
    assert port is not None
    lead(monkeypatch, NAME, SILENT, "127.0.0.1")
    endpoint_url = f"http://{NAME}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint_url)
    with silent_address(port):
        assert all(await ask(*Questions(moto, endpoint_url, origins).all))
