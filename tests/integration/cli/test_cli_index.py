"""`shardcache index` against a real daemon."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.cli.making.sample_table import check_same
from shardcache.errors import ConfigError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef
from shardcache_client.reader import ShardReader
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, table_rows, write_shards
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import FaultyS3

SHARDS = 6
SAMPLES = 10
SIZES = {"bin": 40_000}
SHARD_BYTES = 500_000  # one shard, and what is set aside for its sidecar


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder with a dataset."""
    folder = tmp_path / "store"
    folder.mkdir()
    write_shards(folder, SHARDS, SAMPLES, SIZES)
    return folder


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests here, with room for two shards, which believes no listing."""
    with Daemon(
        tmp_path_factory.mktemp("d"), "--listing-ttl-s", "0", capacity=str(2 * SHARD_BYTES)
    ) as daemon:
        yield daemon


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an index."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["shardlist"]
    return found


def done(ran: Ran) -> dict[str, Any]:
    """Return the numbers of the last event that tell what was fetched."""
    assert ran.events[-1]["event"] == "done"
    return {name: ran.events[-1][name] for name in ("fetched", "known", "failed", "origin_bytes")}


def manifest(daemon: Daemon, url: str) -> list[ShardRef]:
    """Return what a session is told that a url stands for."""
    with RawSession(daemon) as session:
        return list(Shards.unpack(session.ask("resolve", urls=[url])["packed"]))


@pytest.mark.slow
def test_a_dataset_larger_than_the_cache_is_indexed(
    daemon: Daemon, store: Path, tmp_path: Path
) -> None:
    """Each shard is fetched once and passes through, and rows are right and in order."""
    index = tmp_path / "index.json"
    pattern = f"file://{store}/shard-{{000005..000000}}.tar"
    before = daemon.status()["counters"]
    ran = shardcache("index", "--json", pattern, "-o", index, socket=daemon.socket)
    assert ran.code == 0
    paths = sorted(store.iterdir(), reverse=True)
    told = [(row["url"], row["nsamples"], row["filesize"]) for row in rows(index)]
    assert told == [(f"file://{path}", SAMPLES, path.stat().st_size) for path in paths]
    origin_bytes = sum(path.stat().st_size for path in paths)
    assert done(ran) == {"fetched": SHARDS, "known": 0, "failed": 0, "origin_bytes": origin_bytes}
    assert ran.events[0] == {"event": "resolved", "shards": SHARDS, "total_bytes": origin_bytes}
    assert ran.events[-1]["samples"] == SHARDS * SAMPLES
    after = daemon.status()["counters"]
    assert after["origin_bytes"] - before["origin_bytes"] == origin_bytes
    assert after["evictions"] - before["evictions"] >= SHARDS - 2


@pytest.mark.slow
def test_counts_outlive_eviction_and_restart(daemon: Daemon, store: Path, tmp_path: Path) -> None:
    """A shard fetched once is counted for ever, and an index of such shards reads no byte.

    Used as a url, the index tells sessions urls, versions, sizes and counts, as a listing of what
    was counted does.
    """
    url = f"file://{store}/shard-000000.tar"
    first = tmp_path / "first.json"
    second = tmp_path / "second.json"
    assert manifest(daemon, url)[0].samples is None
    assert shardcache("warm", url, socket=daemon.socket).code == 0
    assert shardcache("evict", url, socket=daemon.socket).code == 0
    daemon.restart()
    assert url not in [row["url"] for row in daemon.shards()]
    assert manifest(daemon, url)[0].samples == SAMPLES
    assert shardcache("index", f"file://{store}/", "-o", first, socket=daemon.socket).code == 0
    daemon.restart()
    ran = shardcache("index", "--json", f"file://{store}/", "-o", second, socket=daemon.socket)
    assert ran.code == 0
    assert done(ran) == {"fetched": 0, "known": SHARDS, "failed": 0, "origin_bytes": 0}
    assert second.read_text() == first.read_text()
    assert daemon.status()["counters"]["origin_bytes"] == 0
    told = manifest(daemon, f"file://{second}")
    assert told == manifest(daemon, f"file://{store}/")
    assert [(ref.samples, ref.version is None) for ref in told] == [(SAMPLES, False)] * SHARDS


def test_table_of_the_samples_is_written_next_to_the_index(
    daemon: Daemon, store: Path, tmp_path: Path
) -> None:
    """Keys and sizes of all members of the index's versions, despite a cache of two shards."""
    index = tmp_path / "index.json"
    table = tmp_path / "index.samples"
    ran = shardcache(
        "index", "--json", f"file://{store}/", "-o", index, "--samples", socket=daemon.socket
    )
    assert ran.code == 0, ran.err
    progress = [
        event for event in ran.events if event["event"] == "progress" and "done_shards" in event
    ][:SHARDS]
    assert [event["done_shards"] for event in progress] == [*range(1, SHARDS + 1)]
    assert (
        progress[-1]["done_bytes"]
        == progress[-1]["total_bytes"]
        == sum(row["filesize"] for row in rows(index))
    )
    assert done(ran)["fetched"] == 0
    assert done(ran)["known"] == SHARDS
    told = table_rows(table)
    assert [row["version"] for row in told] == [row["etag"] for row in rows(index)]
    assert [(row["shard"], row["first"], row["samples"]) for row in told] == [
        (shard, 0, SAMPLES) for shard in range(SHARDS)
    ]
    assert [key for row in told for key in row["keys"]] == [
        f"{number:06d}" for number in range(SHARDS * SAMPLES)
    ]
    assert all(row["sizes"] == {"bin": [SIZES["bin"]] * SAMPLES} for row in told)


@pytest.mark.slow
def test_metadata_that_cannot_be_kept_names_shard_and_sample(
    daemon: Daemon, store: Path, tmp_path: Path
) -> None:
    """Of a shard that fails, or has no metadata, neither the table nor the index is written."""
    options = (f"{store}/", "-o", tmp_path / "index.json", "--samples")
    ran = shardcache("index", *options, "--metadata", "bin", socket=daemon.socket)
    told = " ".join(ran.err.split())
    assert ran.code == 1
    assert "the member 'bin' of the sample '000000' holds no valid metadata" in told
    assert "shard-000000.tar" in told
    assert "--metadata json:width,height" in told
    (store / "shard-000002.tar").write_bytes(b"no tar" * 1000)
    ran = shardcache("index", *options, socket=daemon.socket)
    assert ran.code == 1
    assert "shard-000002.tar" in ran.err
    assert not [path for path in tmp_path.iterdir() if "index" in path.name]


def test_a_table_of_other_versions_is_not_kept() -> None:
    """A shard that is replaced between the table and the index is named."""
    before = [ShardRef("s3://a/0.tar", "1"), ShardRef("s3://a/1.tar", "1")]
    check_same(before, before)
    with pytest.raises(ConfigError, match="shards changed while") as caught:
        check_same(before, [before[0], ShardRef("s3://a/1.tar", "2")])
    assert caught.value.url == "s3://a/1.tar"
    with pytest.raises(ConfigError, match="shards changed while"):
        check_same(before, before[:1])


@pytest.mark.slow
def test_an_old_index_is_brought_up_to_date(daemon: Daemon, store: Path, tmp_path: Path) -> None:
    """A url may name it, even to a new daemon, and only the replaced shard is read.

    A listing that the daemon remembers is not trusted: a shard that was replaced a moment ago is
    counted again.
    """
    index = tmp_path / "index.json"
    assert shardcache("index", f"file://{store}/", "-o", index, socket=daemon.socket).code == 0
    before = rows(index)
    replaced = store / "shard-000003.tar"
    replaced.write_bytes(make_tar(random_samples(3, SIZES)))
    (tmp_path / "other").mkdir()
    with Daemon(tmp_path / "other") as other:
        ran = shardcache("index", "--json", f"file://{index}", "-o", index, socket=other.socket)
    assert ran.code == 0
    assert done(ran)["fetched"] == 1
    assert done(ran)["known"] == SHARDS - 1
    after = rows(index)
    assert after[3]["nsamples"] == 3
    assert after[3]["filesize"] == replaced.stat().st_size
    assert after[3]["etag"] != before[3]["etag"]
    assert after[:3] + after[4:] == before[:3] + before[4:]
    assert [ref.samples for ref in manifest(daemon, f"file://{store}/")] == [SAMPLES] * 3 + [
        None
    ] + [SAMPLES] * 2
    (store / "shard-000001.tar").write_bytes(make_tar(random_samples(2, SIZES)))
    assert shardcache("index", f"file://{store}/", "-o", index, socket=daemon.socket).code == 0
    assert [row["nsamples"] for row in rows(index)] == [SAMPLES, 2, SAMPLES, 3, SAMPLES, SAMPLES]


@pytest.mark.slow
async def test_a_version_that_is_gone_is_an_error(faulty: FaultyS3, tmp_path: Path) -> None:
    """A plan by an index gets the versions named there, or an error with url and remedy."""

    def put(place: str, samples: int) -> str:
        body = make_tar(random_samples(samples))
        path = tmp_path / "a.tar"
        path.write_bytes(body)
        url = faulty.put(f"{place}.tar", body)
        return {"s3": url, "http": faulty.http_url(f"{place}.tar"), "file": f"file://{path}"}[place]

    def lease(daemon: Daemon) -> dict[str, Any]:
        with RawSession(daemon) as session:
            found = Shards.unpack(
                session.ask("resolve", urls=[f"file://{tmp_path}/index.json"])["packed"]
            )
            planned = session.ask("plan", shards=[found.fingerprint], order=[0], reads=1)
            assert planned["type"] == "ok"
            return session.ask("lease", position=0, partial=False)

    def steps() -> None:
        with Daemon(tmp_path, "--listing-ttl-s", "0", env=faulty.env()) as daemon:
            for place in ("s3", "http", "file"):
                url = put(place, 10)
                flags = ("index", url, "-o", tmp_path / "index.json")
                assert shardcache(*flags, socket=daemon.socket).code == 0
                assert lease(daemon)["samples"] == 10
                put(place, 3)
                # It is cached, and still what the index names.
                assert lease(daemon)["samples"] == 10
                assert shardcache("evict", url, socket=daemon.socket).code == 0
                error = lease(daemon)["error"]
                assert error["code"] == "outdated"
                assert error["url"] == url
                assert "shardcache index" in error["remedy"]
                assert shardcache(*flags, socket=daemon.socket).code == 0
                assert lease(daemon)["samples"] == 3

    await asyncio.to_thread(steps)


@pytest.mark.slow
def test_sizes_in_a_listing_are_not_asked_again(moto: Bucket, tmp_path: Path) -> None:
    """Once counts are known, an index of a thousand shards in a bucket costs one listing."""
    for number in range(3):
        moto.put(f"train/{number}.tar", make_tar(random_samples(number, first=10 * number)))
    flags = ("index", f"{moto.url}/train/", "-o", tmp_path / "index.json")
    with Daemon(tmp_path, "--listing-ttl-s", "0", env=moto.env()) as daemon:
        assert shardcache(*flags, socket=daemon.socket).code == 0
        before = daemon.status()["counters"]["origin_requests"]
        assert shardcache(*flags, socket=daemon.socket).code == 0
        assert daemon.status()["counters"]["origin_requests"] == before + 1
    etags = [
        moto.server.client.head_object(Bucket=moto.name, Key=f"train/{n}.tar")["ETag"]
        for n in range(3)
    ]
    told = [(row["nsamples"], row["etag"]) for row in rows(tmp_path / "index.json")]
    assert told == [(number, etag.strip('"')) for number, etag in enumerate(etags)]


def test_a_shard_that_fails_leaves_no_index(daemon: Daemon, store: Path, tmp_path: Path) -> None:
    """A truncated shard and a missing one give exit 1, and the earlier file stays as it was."""
    truncated = store / "shard-000001.tar"
    truncated.write_bytes(truncated.read_bytes()[:3000])
    index = tmp_path / "index.json"
    index.write_text("{}")
    pattern = f"file://{store}/shard-{{000000..{SHARDS:06d}}}.tar"
    ran = shardcache("index", pattern, "-o", index, socket=daemon.socket)
    assert ran.code == 1
    assert index.read_text() == "{}"
    assert ran.out.count("failed  ") == 2
    assert f"failed  file://{truncated}: " in ran.out
    assert f"{SHARDS + 1} shards, 50 samples: 5 fetched, 0 already known, 2 failed" in ran.out
    assert "no index written" in ran.out
    ran = shardcache("index", "--json", pattern, "-o", tmp_path / "none.json", socket=daemon.socket)
    errors = {event["error"]["code"] for event in ran.events if event["event"] == "error"}
    assert ran.code == 1
    assert errors == {"truncated", "not_found"}
    assert not (tmp_path / "none.json").exists()


def test_standard_output_has_the_index_alone(daemon: Daemon, store: Path) -> None:
    """Messages go elsewhere with `-o -`, and urls below the given folder are relative to it."""
    flags = ("--relative-to", f"file://{store}", "-o", "-")
    ran = shardcache("index", f"file://{store}/shard-*.tar", *flags, socket=daemon.socket)
    assert [row["url"] for row in ran.json["shardlist"]] == sorted(
        path.name for path in store.iterdir()
    )
    assert f"{SHARDS} shards, {SHARDS * SAMPLES} samples" in ran.err


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["-o", "s3://bucket/index"], ".json"),
        (["-o", "index.txt"], ".json"),
        (["-o", ""], ".json"),
        (["-o", "s3://index.json"], "names a bucket"),
        (["-o", "/no/such/folder/index.json"], "does not exist"),
        (["-o", "-", "--json"], "standard output"),
        ([], "--output"),
        (["-o", "-", "--samples"], "--samples writes a second file"),
        (["-o", "index.json", "--metadata", "json"], "pass --samples, too"),
        (["-o", "index.json", "--samples", "--metadata", ".json"], "no dot"),
    ],
)
def test_output_that_cannot_be_written_is_refused_before_any_work(
    flags: list[str], hint: str, tmp_path: Path
) -> None:
    """Before any daemon is asked, and not after hours of reading."""
    ran = shardcache("index", "s3://bucket/a.tar", *flags, socket=tmp_path / "no.sock")
    assert ran.code == 2
    assert hint in ran.err


@pytest.mark.slow
def test_an_index_is_uploaded_beside_its_shards(moto: Bucket, tmp_path: Path) -> None:
    """Its table comes along, which is no shard of a prefix. A second upload replaces both."""
    moto.put("train/0.tar", make_tar(random_samples(5)))
    output = f"{moto.url}/train/index.json"
    with Daemon(tmp_path) as daemon:
        for shards in ("", "*.tar"):
            ran = shardcache(
                "index",
                f"{moto.url}/train/{shards}",
                "-o",
                output,
                "--samples",
                socket=daemon.socket,
            )
            assert ran.code == 0, ran.err
            assert ran.out.startswith("1 shard, 5 samples"), ran.err
        dataset = ShardReader(output, socket=daemon.socket)
        assert len(dataset.select(lambda entry: entry.key == "000003")) == 1
