"""Keys that sessions have handed over: each one's requests use its own first, then others."""

import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.errors import AccessDeniedError
from shardcache.origin.registry import Origins
from shardcache.shared.credentials.aws_keys import AwsKeys
from support.stores.buckets import hand_over, read_range, use_aws
from support.stores.faulty_s3 import FaultyS3

DATA = bytes(range(256)) * 16
UID = os.geteuid()


def keys(name: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": f"secret-of-{name}"}


def fill(store: FaultyS3, *folders: str) -> list[str]:
    """Store three objects in each folder; return the urls, one of each folder after another."""
    return [store.put(f"{folder}/{number}.tar", DATA) for number in range(3) for folder in folders]


@pytest.fixture
async def origins(
    faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Origins]:
    """Origins of a private daemon with a key for `own/`, and two more handed over."""
    use_aws(monkeypatch, tmp_path, faulty.env() | keys("own"))
    faulty.permits = {"own": "own/", "one": "one/", "two": "two/"}
    origins = Origins([], max_connections=4, is_private=True)
    for name in ("one", "two"):
        hand_over(origins, keys(name))
    yield origins
    await origins.close()


async def read(origins: Origins, url: str) -> None:
    origin = origins.origin(url)
    obj = await origin.stat(url)
    assert await read_range(origin, obj, 100, 2000) == DATA[100:2000]


@pytest.mark.parametrize("name", ["one", "two", "own"])
async def test_key_of_the_session_is_tried_first(
    faulty: FaultyS3, origins: Origins, name: str
) -> None:
    """It is the only one in the store's log, whichever was last, even the daemon's own."""
    with origins.session_credentials.held(keys(name), UID):
        for url in fill(faulty, name):
            await read(origins, url)
    assert set(faulty.askers) == {name}


async def test_sessions_read_one_bucket_in_turn_by_their_own_keys(
    faulty: FaultyS3, origins: Origins
) -> None:
    """A session asks with its own key, whatever another one has just read."""
    for url in fill(faulty, "one", "two"):
        name = url.split("/")[-2]
        with origins.session_credentials.held(keys(name), UID):
            await read(origins, url)
    assert {
        (key.partition("/")[0], asker)
        for (_, key, *_), asker in zip(faulty.seen, faulty.askers, strict=True)
    } == {
        ("one", "one"),
        ("two", "two"),
    }


async def test_refusals_are_remembered_by_folder(faulty: FaultyS3, origins: Origins) -> None:
    """Keys of others are refused once in each folder of a session, not for each object."""
    urls = fill(faulty, "one", "two")
    with origins.session_credentials.held(keys("none"), UID):
        for url in urls[:2]:
            await read(origins, url)
        faulty.askers.clear()
        for url in urls[2:]:
            await read(origins, url)
    assert set(faulty.askers) == {"one", "two"}
    assert len(faulty.askers) == 2 * len(urls[2:])


async def test_missing_permissions_are_no_reason_to_doubt_a_key(
    faulty: FaultyS3, origins: Origins
) -> None:
    """S3 also refuses what is missing: that says nothing about the next object."""
    first, second, _ = fill(faulty, "one")
    with origins.session_credentials.held(keys("one"), UID):
        faulty.permits["one"] = "one/1"
        with pytest.raises(AccessDeniedError):
            await read(origins, first)
        faulty.askers.clear()
        await read(origins, second)
    assert set(faulty.askers) == {"one"}


async def test_permission_that_is_granted_later_is_used(faulty: FaultyS3, origins: Origins) -> None:
    """At once where no other key has it."""
    first, second, _ = fill(faulty, "one")
    with origins.session_credentials.held(keys("two"), UID):
        await read(origins, first)
        faulty.permits = {"two": "one/"}
        await read(origins, second)


async def test_keys_that_are_kept_no_longer_are_forgotten(
    faulty: FaultyS3, origins: Origins
) -> None:
    """Nothing in memory has them any more."""
    (url, *_) = fill(faulty, "one")
    await read(origins, url)
    for number in range(20):
        hand_over(origins, keys(f"later{number}"))
    faulty.permits = {}
    await read(origins, url)
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, AwsKeys)]
    assert "one" not in [each.access_key for each in kept]
