"""Connections that died without a word, and addresses that nobody answers at."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shardcache.origin.registry import Origins
from shardcache.transport.connections import SILENCE_S
from shardcache.transport.workers import nothing
from support.network.lead import SILENT, SilentAddress, lead
from support.stores.buckets import Bucket, read_range, use_aws
from support.stores.faulty_proxy import FaultyProxy
from support.stores.mischief import Mischief

DATA = bytes(range(256)) * 400
CONNECTIONS = 4
NAME = "store"
Question = Callable[[Origins, str], Awaitable[object]]


@pytest.fixture
def proxy(moto: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """A proxy before a store; this process's AWS variables point at the proxy."""
    with FaultyProxy(moto.env()["AWS_ENDPOINT_URL"]) as proxy:
        use_aws(monkeypatch, tmp_path, proxy.env(moto.env()))
        yield proxy


async def stat(origins: Origins, url: str) -> object:
    """Ask what the object is."""
    return await origins.origin(url).stat(url)


async def read(origins: Origins, url: str) -> object:
    """Read all of it."""
    return await read_range(origins.origin(url), await origins.origin(url).stat(url), 0, len(DATA))


async def list_all(origins: Origins, url: str) -> object:
    """List its folder."""
    return await origins.origin(url).list_prefix(url.removesuffix("a.tar"), nothing)


def questions(bucket: Bucket, endpoint_url: str) -> list[tuple[Question, str]]:
    """Store an object and return all ways to ask for it."""
    url = bucket.put("a.tar", DATA, ACL="public-read")
    web_url = f"{endpoint_url}/{bucket.name}/a.tar"
    return [(stat, url), (read, url), (list_all, url), (stat, web_url), (read, web_url)]


async def ask_all(origins: Origins, asked: list[tuple[Question, str]]) -> list[object]:
    """Ask each question several times at once, so that several connections are open."""
    return await asyncio.gather(*(question(origins, url) for question, url in asked for _ in range(CONNECTIONS)))


async def test_connections_that_died_silently_cost_one_wait(moto: Bucket, proxy: FaultyProxy, origins: Origins) -> None:
    """Each question is answered at its first try, over a new connection, though all idle ones swallow what is sent."""
    asked = questions(moto, proxy.endpoint_url)
    wanted = await ask_all(origins, asked)
    assert proxy.forget() > CONNECTIONS
    assert await ask_all(origins, asked) == wanted
    swallowed = proxy.swallowed
    assert swallowed > CONNECTIONS
    assert await ask_all(origins, asked) == wanted
    assert proxy.swallowed == swallowed  # those that nobody tried are not trusted either


async def test_a_request_without_an_answer_is_repeated_over_a_new_connection(
    moto: Bucket, proxy: FaultyProxy, origins: Origins
) -> None:
    """A caller whose limit of time is short gets its answer at the second try, however many idle ones there are."""
    asked = questions(moto, proxy.endpoint_url)
    asked = [asked[0], asked[2]]  # the SDK lists, over connections of its own
    wanted = await ask_all(origins, asked)
    assert proxy.forget() > CONNECTIONS
    for question, url in asked:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await question(origins, url)
    assert proxy.swallowed == len(asked)
    assert await ask_all(origins, asked) == wanted
    assert proxy.swallowed == len(asked)


async def test_the_slower_of_two_requests_casts_no_doubt(moto: Bucket, proxy: FaultyProxy, origins: Origins) -> None:
    """A question that is given up while others are answered over idle connections leaves these in use."""
    url = questions(moto, proxy.endpoint_url)[3][1]
    origin = origins.origin(url)
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


async def test_a_silent_first_address_is_passed_over(
    moto: Bucket, proxy: FaultyProxy, origins: Origins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose first address takes no connection is asked at its second."""
    port = urlsplit(proxy.endpoint_url).port
    assert port is not None
    lead(monkeypatch, NAME, SILENT, "127.0.0.1")
    endpoint_url = f"http://{NAME}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint_url)
    with SilentAddress(port):
        assert all(await ask_all(origins, questions(moto, endpoint_url)))
