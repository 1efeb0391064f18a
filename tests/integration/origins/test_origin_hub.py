"""The Hugging Face Hub: signed urls that expire, git LFS and git files, and safe tokens."""

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.errors import (
    AccessDeniedError,
    CorruptShardError,
    NotAllowedError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    ShardChangedError,
)
from shardcache.origin.objects import Checksum
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import nothing
from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import hand_over, read_range, read_whole
from support.stores.object_servers import HubServer, git_sha

pytest.importorskip("huggingface_hub", minversion="2", reason="pip install 'shardcache[hf]'")

DATA = bytes(range(256)) * 400
SHA = int(hashlib.sha256(DATA).hexdigest(), 16)
PATH = "/datasets/org/set/resolve/main/train/a b.tar"
URL = "hf://datasets/org/set/train/a b.tar"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hub with a shard in LFS and an index in git."""
    with HubServer() as hub:
        hub.put_lfs(PATH, DATA)
        hub.put("/datasets/org/set/resolve/v1/index.json", DATA[:1000])
        yield hub


def origins_of(hub: HubServer, **table: Any) -> Origins:
    """Return origins that reach the Hub with its token."""
    given = {
        "match": "hf://",
        "endpoint_url": hub.endpoint_url,
        "storage_options": {"token": hub.TOKEN},
        **table,
    }
    return Origins([OriginTable.model_validate(given)], max_connections=16, is_private=True)


@pytest.fixture
async def origins(hub: HubServer) -> AsyncIterator[Origins]:
    """Origins for the Hub."""
    origins = origins_of(hub)
    yield origins
    await origins.close()


async def test_file_in_lfs_is_read_from_where_the_hub_leads(
    hub: HubServer, origins: Origins
) -> None:
    """The SHA-256 is version and checksum; the token reaches no server but the Hub."""
    origin = origins.origin(URL)
    obj = await origin.stat(URL)
    assert obj.size_bytes == len(DATA)
    assert obj.version == f"{SHA:064x}"
    assert obj.checksum == Checksum("sha256", SHA)
    assert obj.has_ranges is True
    assert obj.is_guarded is True
    assert obj.is_joinable is True
    assert await read_range(origin, obj, 1000, 70_000) == DATA[1000:70_000]
    assert b"".join(await read_whole(origin, obj, 30_000)) == DATA
    assert len(hub.requests) == 1
    assert not any("authorization" in headers for _, _, headers in hub.content.requests)


async def test_expired_url_is_obtained_again_for_the_same_version(
    hub: HubServer, origins: Origins
) -> None:
    """The read goes on; if the file has been replaced since, that is a changed shard."""
    origin = origins.origin(URL)
    obj = await origin.stat(URL)
    hub.content.signed += 1
    assert await read_range(origin, obj, 0, 500) == DATA[:500]
    hub.put_lfs(PATH, DATA[::-1])
    hub.content.signed += 1
    with pytest.raises(ShardChangedError, match="another version"):
        await read_range(origin, obj, 0, 500)
    hub.content.refusals = [(403, {}, b"")] * 2
    with pytest.raises(AccessDeniedError):
        await read_range(origin, await origin.stat(URL), 0, 500)


async def test_file_in_git_is_read_from_the_hub_itself(hub: HubServer, origins: Origins) -> None:
    """Revisions are part of the url; redirects within the Hub are followed with the token."""
    url = "hf://datasets/org/set@v1/index.json"
    origin = origins.origin(url)
    obj = await origin.stat(url)
    checksum = Checksum("git blob", int(git_sha(DATA[:1000]), 16))
    assert obj.size_bytes == 1000
    assert obj.version == git_sha(DATA[:1000])
    assert obj.checksum == checksum
    assert await read_range(origin, obj, 10, 900) == DATA[10:900]
    hub.put("/datasets/org/set/resolve/v1/index.json", DATA[1000:2000])
    with pytest.raises(ShardChangedError):
        await read_range(origin, obj, 10, 900)


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, AccessDeniedError), (404, NotFoundError), (429, OriginBusyError), (500, OriginError)],
)
async def test_refusals_of_the_hub_and_of_the_other_server_are_typed(
    status: int, error: type[OriginError], hub: HubServer, origins: Origins
) -> None:
    """Neither is taken for the other's, and what is no file's url is not found."""
    origin = origins.origin(URL)
    obj = await origin.stat(URL)
    for server, request in ((hub, origin.stat(URL)), (hub.content, read_range(origin, obj, 0, 10))):
        server.refusals = [(status, {}, b"")] * 2
        with pytest.raises(error):
            await request
        server.refusals = []
    for url in ("hf://datasets/org", "hf://buckets/org/set/a.tar", "hf://datasets/org/set/no.tar"):
        with pytest.raises(NotFoundError):
            await origin.stat(url)


async def test_listing_has_the_versions_that_stat_returns(hub: HubServer, origins: Origins) -> None:
    """huggingface_hub lists LFS and git files, and an index of them names real versions."""
    hub.put("/datasets/org/set/resolve/main/train/b.tar", DATA[:1000])
    origin = origins.origin(URL)
    wanted = [await origin.stat(f"hf://datasets/org/set/train/{name}.tar") for name in ("a b", "b")]
    assert await origin.list_prefix("hf://datasets/org/set/train/", nothing) == wanted
    assert await origin.list_prefix("hf://datasets/org/set/train/", nothing, flat=True) == wanted


async def test_wrong_or_no_token_is_denied(hub: HubServer) -> None:
    """A 401 is not taken for an expired url."""
    for table in (
        {"storage_options": {"token": "hf_wrong"}},
        {"storage_options": {}, "anon": True},
    ):
        origins = origins_of(hub, **table)
        with pytest.raises(AccessDeniedError):
            await origins.origin(URL).stat(URL)
        await origins.close()


ONE = "/datasets/org/one"
TWO = "/datasets/org/two"
ONE_URL = "hf://datasets/org/one/a.tar"
TWO_URL = "hf://datasets/org/two/a.tar"


@pytest.fixture
async def shared(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Origins]:
    """A private daemon's origins, with tokens from two sessions, each for a repository."""
    for repository in (ONE, TWO):
        hub.put_lfs(f"{repository}/resolve/main/a.tar", DATA)
        hub.put(f"{repository}/resolve/main/b.tar", DATA)
    hub.tokens = {"hf_one": ONE, "hf_two": TWO}
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    origins = Origins(
        [OriginTable(match="hf://", endpoint_url=hub.endpoint_url)],
        max_connections=4,
        is_private=True,
    )
    for token in hub.tokens:
        hand_over(origins, {"HF_TOKEN": token})
    yield origins
    await origins.close()


@pytest.mark.slow
async def test_each_repository_is_read_with_the_token_that_may_read_it(shared: Origins) -> None:
    """Files are described, fetched and listed, whichever token was handed over last."""
    for url in (ONE_URL, TWO_URL, ONE_URL):
        for name in ("a.tar", "b.tar"):
            file = url.replace("a.tar", name)
            origin = shared.origin(file)
            data = await read_range(origin, await origin.stat(file), 100, 70_000)
            assert data == DATA[100:70_000]
        folder = url.removesuffix("a.tar")
        listed = await shared.origin(folder).list_prefix(folder, nothing)
        assert [obj.url for obj in listed] == [f"{folder}a.tar", f"{folder}b.tar"]


async def test_listing_needs_no_file_that_was_read_before(shared: Origins) -> None:
    """The token with permission is found by the listing itself."""
    for folder in ("hf://datasets/org/one/", "hf://datasets/org/two/"):
        assert len(await shared.origin(folder).list_prefix(folder, nothing)) == 2


@pytest.mark.slow
async def test_missing_file_is_not_found_though_other_tokens_are_denied(
    hub: HubServer, shared: Origins
) -> None:
    """The answer to the permitted token is final; an expired token's 401 is not raised."""
    hand_over(shared, {"HF_TOKEN": "hf_also_expired"})
    for url in (ONE_URL, TWO_URL):
        missing = url.replace("a.tar", "missing.tar")
        with pytest.raises(NotFoundError):
            await shared.origin(missing).stat(missing)
        hub.requests.clear()
        with pytest.raises(NotFoundError):
            await shared.origin(missing).stat(missing)
        assert len(hub.requests) == 1


async def test_revoked_token_is_replaced_by_another_with_permission(
    hub: HubServer, shared: Origins
) -> None:
    """Also while a file of git is fetched, which has been described with the revoked one."""
    file = ONE_URL.replace("a.tar", "b.tar")
    origin = shared.origin(file)
    obj = await origin.stat(file)
    del hub.tokens["hf_one"]
    with pytest.raises(AccessDeniedError):
        await read_range(origin, obj, 0, 500)
    hub.tokens["hf_new"] = ONE
    hand_over(shared, {"HF_TOKEN": "hf_new"})
    assert await read_range(origin, obj, 0, 500) == DATA[:500]
    assert await origin.stat(file) == obj


@pytest.mark.slow
async def test_token_that_has_lost_its_permission_is_replaced(
    hub: HubServer, shared: Origins
) -> None:
    """The Hub answers that there is no repository, and the search for a token goes on."""
    obj = await shared.origin(ONE_URL).stat(ONE_URL)
    hub.tokens = {"hf_one": TWO, "hf_two": ONE}
    assert await shared.origin(ONE_URL).stat(ONE_URL) == obj


@pytest.mark.slow
async def test_token_of_a_table_is_the_only_one(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's token does not go where the config names another, or none."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for table in (
        {"storage_options": {"token": "hf_wrong"}},
        {"storage_options": {}, "anon": True},
    ):
        origins = origins_of(hub, **table)
        hand_over(origins, {"HF_TOKEN": hub.TOKEN})
        with pytest.raises(AccessDeniedError):
            await origins.origin(URL).stat(URL)
        await origins.close()


async def test_redirect_to_this_node_is_refused_and_the_token_stays(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub elsewhere can neither read this node's services nor take the token away."""
    monkeypatch.setenv("http_proxy", hub.endpoint_url)
    origins = origins_of(hub, endpoint_url="http://hub.example")
    for place in (
        hub.content.endpoint_url,
        "http://metadata.google.internal",
        hub.content.endpoint_url[5:],
    ):
        hub.elsewhere = f"{place}/secret"
        with pytest.raises(NotAllowedError, match="this node"):
            await origins.origin(URL).stat(URL)
    assert not hub.content.requests
    assert {headers["host"] for _, _, headers in hub.requests} == {"hub.example"}
    await origins.close()


TAR_PATH = "/datasets/org/set/resolve/main/small.tar"
SAMPLES = random_samples(10)
RIGHT = make_tar(SAMPLES)
WRONG = make_tar(random_samples(10, seed=1))


@pytest.fixture
def daemon(hub: HubServer, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that reads from the Hub, where a shard is in git."""
    hub.put(TAR_PATH, RIGHT)
    flags = ("--part-size", "65536")
    with Daemon(
        tmp_path, *flags, env={"HF_ENDPOINT": hub.endpoint_url, "HF_TOKEN": hub.TOKEN}
    ) as daemon:
        yield daemon


def samples_of(daemon: Daemon, url: str) -> list[bytes]:
    """Return the values of a dataset's samples, read once all of a shard has been checked."""
    dataset = ShardDataset(url, socket=daemon.socket, partial_reads=False)
    return [sample["jpg"] for sample in dataset]


def test_file_in_git_is_fetched_again_if_its_bytes_are_of_another_version(
    hub: HubServer, daemon: Daemon
) -> None:
    """A CDN's server with the present ETag and other bytes gives no wrong sample."""
    assert len(WRONG) == len(RIGHT)
    hub.mixed[TAR_PATH] = [WRONG]
    assert samples_of(daemon, "hf://datasets/org/set/small.tar") == [
        sample["jpg"] for sample in SAMPLES
    ]
    assert daemon.status()["counters"]["corrupt"] == 1


@pytest.mark.slow
def test_file_in_git_whose_bytes_stay_wrong_is_corrupt(hub: HubServer, daemon: Daemon) -> None:
    """The error names the checksum that the bytes lack."""
    hub.mixed[TAR_PATH] = [WRONG] * 10
    with pytest.raises(CorruptShardError, match="git blob of the received bytes"):
        samples_of(daemon, "hf://datasets/org/set/small.tar")


@pytest.mark.slow
def test_index_file_in_git_is_requested_again_if_its_bytes_are_of_another_version(
    hub: HubServer, daemon: Daemon
) -> None:
    """An index of other shards under the present ETag is not taken for this one."""
    index, other = (
        json.dumps(
            {
                "__kind__": "wids-shard-index-v1",
                "wids_version": 1,
                "shardlist": [{"url": name, "nsamples": 10}],
            }
        )
        for name in ("small.tar", "other.tar")
    )
    path = "/datasets/org/set/resolve/main/index.json"
    hub.put(path, index.encode())
    hub.mixed[path] = [other.encode()]
    assert samples_of(daemon, "hf://datasets/org/set/index.json") == [
        sample["jpg"] for sample in SAMPLES
    ]


MIRRORED_PATH = "/datasets/org/set/resolve/main/mirrored.tar"
MIRRORED = "hf://datasets/org/set/mirrored.tar"
OF_PARTS = random_samples(200)
OTHERS = random_samples(200, seed=1)


def images(samples: list[dict[str, Any]]) -> list[bytes]:
    """Return the values that `samples_of` reads."""
    return [sample["jpg"] for sample in samples]


@pytest.fixture
def mirrored(hub: HubServer) -> HubServer:
    """A Hub that redirects to mirrors and states a version that is no checksum."""
    hub.put_lfs(MIRRORED_PATH, make_tar(OF_PARTS))
    hub.tags[MIRRORED_PATH] = "v1"
    return hub


@pytest.mark.slow
def test_file_without_a_checksum_is_not_mixed_of_mirrors(
    mirrored: HubServer, daemon: Daemon
) -> None:
    """A whole shard comes from one mirror if versions of one size cannot be told apart."""
    mirrored.content.mixed = [make_tar(OF_PARTS), make_tar(OTHERS)] * 10
    assert samples_of(daemon, MIRRORED) in (images(OF_PARTS), images(OTHERS))


@pytest.mark.slow
def test_file_without_a_checksum_is_fetched_by_one_request(
    mirrored: HubServer, daemon: Daemon
) -> None:
    """Its server gets a single GET, of the whole file, by the url that the Hub has signed last.

    The Hub signs one url before the read and, when it is asked whether the file is still the same,
    one after it.
    """
    assert samples_of(daemon, MIRRORED) == images(OF_PARTS)
    assert [headers.get("range") for _, _, headers in mirrored.content.requests] == [None]
    assert mirrored.content.signed == 2


@pytest.mark.slow
def test_file_without_a_checksum_is_fetched_again_from_its_first_byte(
    mirrored: HubServer, daemon: Daemon
) -> None:
    """An answer that broke off is not resumed: what follows could be of another mirror."""
    mirrored.content.cuts = 1
    assert samples_of(daemon, MIRRORED) == images(OF_PARTS)
    assert [headers.get("range") for _, _, headers in mirrored.content.requests] == [None, None]


@pytest.mark.parametrize("name", ["shards/", "shards/a.tar"])
async def test_storage_bucket_is_refused_with_the_way_to_read_it(
    name: str, origins: Origins
) -> None:
    """Over the Hub's S3 gateway, both as a prefix and by a file's name."""
    url = f"hf://buckets/org/{name}"
    with pytest.raises(NotFoundError, match="storage buckets") as caught:
        if name.endswith("/"):
            await origins.origin(url).list_prefix(url, nothing)
        else:
            await origins.origin(url).stat(url)
    assert "https://s3.hf.co" in caught.value.remedy
