"""`shardcache doctor` and object stores: its probes, their credentials, and its messages."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cli.doctor import runner
from shardcache.cli.doctor.context import Context, Finding
from support.network.certificates import Authority
from support.network.other_user import open_folder
from support.programs.daemon import Daemon, spawn
from support.shards.tars import make_tar, random_samples, write_shards
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import FaultyS3


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon in a folder that everybody may enter, with a shard in its cache."""
    with open_folder() as folder, Daemon(folder) as daemon:
        [shard] = write_shards(folder, 1, samples_per_shard=200)
        daemon.request("POST", "/v1/warm", {"urls": [f"file://{shard}"]})
        yield daemon


BODY = os.urandom(3_000_000)


async def stores(
    folder: Path, *urls: str, config: str = "", quick: bool = True, allow: tuple[str, ...] = ()
) -> dict[str, Finding]:
    """Return the findings of stores by check, of the last store if there are several."""
    (folder / "conf.toml").write_text(config)
    flags = {"socket": str(folder / "s.sock")} | ({"allow": allow} if allow else {})
    context = await asyncio.to_thread(Context, flags, folder / "conf.toml", urls, quick=quick)
    found = await runner.examine(context, runner.CHECKS[-1:])
    return {finding.check: finding for finding in found}


def works(finding: Finding) -> bool:
    """Tell whether it was found to work; how fast depends on who else uses this machine."""
    return finding.state in ("ok", "warning")


@pytest.mark.slow
async def test_doctor_passes_a_healthy_bucket(moto: Bucket, tmp_path: Path) -> None:
    """It reports the credentials' source, the time to the first byte and the rate."""
    url = moto.put("a-000000.tar", BODY)
    found = await stores(tmp_path, url, quick=False)
    checks = ("origin.credentials", "origin.reach", "origin.speed")
    assert tuple(found) == checks, found
    assert all(map(works, found.values())), found
    assert found["origin.credentials"].found.startswith("AWS_ACCESS_KEY_ID in the environment")
    assert found["origin.credentials"].found.endswith("'s own)")
    assert found["origin.reach"].figures["size_bytes"] == len(BODY)
    assert found["origin.reach"].figures["first_byte_s"] > 0
    assert found["origin.speed"].figures["read_bytes"] == len(BODY)


@pytest.mark.slow
async def test_stores_of_cached_shards_are_tried_with_the_daemons_credentials(
    seaweedfs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores of tables and of cached shards are tried without a url, but no whole protocols.

    That passes for a user whose own keys are wrong.
    """
    cached = seaweedfs.put("cached/a.tar", make_tar(random_samples(2)))
    _ = seaweedfs.put("below/b.tar", BODY)
    table = f'[[origin]]\nmatch = "{seaweedfs.url}/below/"\n[[origin]]\nmatch = "gs://"\n'
    with Daemon(tmp_path, env=seaweedfs.env(), spawn=spawn) as daemon:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        assert (await stores(tmp_path, config=table))[
            "origin.reach"
        ].subject == f"{seaweedfs.url}/below/"
        daemon.request("POST", "/v1/warm", {"urls": [cached]})
        found = await stores(tmp_path, config=table)
    assert works(found["origin.reach"])
    assert found["origin.reach"].subject == cached
    assert "the daemon's, run as" in found["origin.credentials"].found


@pytest.mark.slow
async def test_a_store_is_tried_with_the_certificates_that_the_daemon_trusts(
    tmp_path: Path,
) -> None:
    """A store of the site's own authority is reached, though the user's shell distrusts it."""
    authority = Authority(tmp_path / "authority")
    async with FaultyS3(authority.server()) as server:
        server.put("a.tar", BODY)
        url = server.http_url("a.tar")
        assert (await stores(tmp_path, url))["origin.reach"].state == "failed"
        with Daemon(tmp_path, env={"SSL_CERT_FILE": str(authority.ca_file)}, spawn=spawn):
            found = await stores(tmp_path, url)
    assert works(found["origin.reach"]), found


@pytest.mark.slow
async def test_wrong_credentials_of_a_running_daemon_are_named_and_not_shown(
    seaweedfs: Bucket, tmp_path: Path
) -> None:
    """They fail next to a user whose own are right; their source is named, and what to do."""
    url = seaweedfs.put("a.tar", BODY)
    with Daemon(
        tmp_path, env=seaweedfs.env() | {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, spawn=spawn
    ):
        found = await stores(tmp_path, url)
    assert "the daemon's, run as" in found["origin.credentials"].found
    assert found["origin.reach"].state == "failed"
    assert found["origin.reach"].code == "access_denied"
    assert "the credentials are wrong" in found["origin.reach"].cause
    assert found["origin.reach"].remedy.startswith("give the daemon credentials")
    assert "AWS_PROFILE" in found["origin.reach"].remedy
    shown = str(list(found.values()))
    secrets = ("wrong-secret", os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"])
    assert not any(secret in shown for secret in secrets)


async def test_missing_credentials_name_the_chain(
    moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links of the chain that were asked are named; and so is a profile that nobody wrote."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    url = moto.put("a.tar", BODY)
    found = (await stores(tmp_path, url))["origin.credentials"]
    assert found.state == "failed"
    assert "no credentials found in the chain" in found.found
    assert "anon = true" in found.remedy
    found = (
        await stores(tmp_path, url, config='[[origin]]\nmatch = "s3://"\nprofile = "nobodys"\n')
    )["origin.credentials"]
    assert found.state == "failed"
    assert "nobodys" in found.found
    assert "create the profile" in found.remedy


async def test_an_unreachable_store_names_its_table(tmp_path: Path) -> None:
    """Nothing listens there: the endpoint and the table that names it are told."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        table = f'[[origin]]\nmatch = "s3://b/"\nanon = true\nendpoint_url = "{endpoint}"\n'
        found = await stores(tmp_path, "s3://b/a.tar", config=table)
    assert found["origin.credentials"].found.startswith("none: the [[origin]] table sets anon")
    reach = found["origin.reach"]
    assert reach.state == "failed"
    assert "the [[origin]] table for s3://b/" in reach.cause
    assert "network path" in reach.remedy


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (("AWS_ENDPOINT_URL",), "AWS_ENDPOINT_URL"),
        (("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), "AWS_ENDPOINT_URL_S3"),
    ],
)
async def test_variable_that_names_a_dead_endpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: tuple[str, ...], named: str
) -> None:
    """It is what has to be corrected; of two, the one that counts."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for name in variables:
            monkeypatch.setenv(name, endpoint)
        reach = (await stores(tmp_path, "s3://b/a.tar"))["origin.reach"]
    assert reach.cause.startswith(f"the endpoint {endpoint} is set by {named};")
    assert reach.remedy.startswith(
        f"correct {named}, if {endpoint} is wrong; else check the network path"
    )
    assert reach.code == "origin_unavailable"


async def test_missing_bucket_has_a_remedy_of_its_own(moto: Bucket, tmp_path: Path) -> None:
    """Another name, another store, or the command that makes it; and which endpoint was asked."""
    reach = (await stores(tmp_path, "s3://no-such-bucket-here/train/"))["origin.reach"]
    assert reach.found == "the bucket does not exist"
    assert "is set by AWS_ENDPOINT_URL" in reach.cause
    assert reach.remedy.startswith("correct the bucket's name")
    assert reach.remedy.endswith("aws s3 mb s3://no-such-bucket-here")


async def test_missing_and_disallowed_urls_fail_by_themselves(moto: Bucket, tmp_path: Path) -> None:
    """Two urls of which one is misspelt and one outside the rules: each fails by itself."""
    missing = f"{moto.url}/none.tar"
    outside = "s3://other/a.tar"
    found = (await stores(tmp_path, missing))["origin.reach"]
    assert found.state == "failed"
    assert found.code == "not_found"
    assert "nothing is stored under this url" in found.cause
    assert "not_found" not in found.cause
    assert "typos" in found.remedy
    found = (await stores(tmp_path, outside, allow=(f"{moto.url}/",)))["origin.reach"]
    assert found.state == "failed"
    assert "--allow" in found.remedy


async def test_doctor_warns_of_a_server_without_ranges(faulty: FaultyS3, tmp_path: Path) -> None:
    """Each shard comes in one stream, which is measured all the same."""
    faulty.ranges = False
    faulty.put("a.tar", BODY)
    found = await stores(tmp_path, faulty.http_url("a.tar"), quick=False)
    assert found["origin.reach"].state == "warning"
    assert "range requests" in found["origin.reach"].cause
    assert found["origin.speed"].figures["read_bytes"] == len(BODY)
