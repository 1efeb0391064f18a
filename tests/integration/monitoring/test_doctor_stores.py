"""`shardcache doctor` and stores that are well, down, forbidden, late, or asked in the wrong way."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from shardcache.cli.doctor import runner
from shardcache.cli.doctor.context import Context, Finding
from support.programs.daemon import Daemon, spawn
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import FaultyS3

BODY = os.urandom(3_000_000)


async def look(
    folder: Path, *urls: str, config: str = "", quick: bool = True, allow: tuple[str, ...] = ()
) -> dict[str, Finding]:
    """Return what is found of the stores, by check; where there are several stores, of the last one."""
    (folder / "conf.toml").write_text(config)
    flags = {"socket": str(folder / "s.sock")} | ({"allow": allow} if allow else {})
    context = await asyncio.to_thread(Context, flags, folder / "conf.toml", urls, quick=quick)
    found = await runner.examine(context, runner.CHECKS[-1:])
    return {finding.check: finding for finding in found}


def works(finding: Finding) -> bool:
    """Tell whether it was found to work; how fast depends on who else uses this machine."""
    return finding.state in ("ok", "warning")


async def test_doctor_passes_a_healthy_bucket(moto: Bucket, tmp_path: Path) -> None:
    """Where the credentials come from, the time to the first byte and the rate."""
    url = moto.put("a-000000.tar", BODY)
    found = await look(tmp_path, url, quick=False)
    checks = ("origin.credentials", "origin.reach", "origin.speed")
    assert tuple(found) == checks and all(map(works, found.values())), found
    assert found["origin.credentials"].found.startswith("AWS_ACCESS_KEY_ID in the environment")
    assert found["origin.credentials"].found.endswith("'s own)")
    assert found["origin.reach"].figures["size_bytes"] == len(BODY)
    assert found["origin.reach"].figures["first_byte_s"] > 0
    assert found["origin.speed"].figures["read_bytes"] == len(BODY)


@pytest.mark.parametrize("daemons_are_right", [True, False], ids=["right", "wrong"])
async def test_stores_of_a_running_daemon_are_tried_with_its_credentials(
    daemons_are_right: bool, seaweedfs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With good keys it passes next to a user whose keys are wrong; wrong ones are named by their source, unshown."""
    url = seaweedfs.put("a.tar", BODY)
    daemons, users = ("right", "wrong-secret") if daemons_are_right else ("wrong-secret", "right")
    secrets = {"right": seaweedfs.env()["AWS_SECRET_ACCESS_KEY"], "wrong-secret": "wrong-secret"}
    with Daemon(tmp_path, env=seaweedfs.env() | {"AWS_SECRET_ACCESS_KEY": secrets[daemons]}, spawn=spawn):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secrets[users])
        found = await look(tmp_path, url)
    assert works(found["origin.reach"]) is daemons_are_right
    assert "the daemon's, run as" in found["origin.credentials"].found
    if not daemons_are_right:
        assert "access_denied" in found["origin.reach"].cause and "AWS_PROFILE" in found["origin.reach"].remedy
        assert found["origin.reach"].remedy.startswith("give the daemon credentials")
    shown = json.dumps([finding.to_json() for finding in found.values()])
    assert not any(secret in shown for secret in (*secrets.values(), os.environ["AWS_ACCESS_KEY_ID"]))


async def test_stores_of_cached_shards_are_tried(moto: Bucket, tmp_path: Path) -> None:
    """Without a url, stores of tables are tried, but for those of a whole protocol, and those of cached shards."""
    cached, _ = moto.put("cached/a.tar", make_tar(random_samples(2))), moto.put("below/b.tar", BODY)
    table = f'[[origin]]\nmatch = "{moto.url}/below/"\n[[origin]]\nmatch = "gs://"\n'
    with Daemon(tmp_path, spawn=spawn) as daemon:
        assert (await look(tmp_path, config=table))["origin.reach"].subject == f"{moto.url}/below/"
        daemon.request("POST", "/v1/warm", {"urls": [cached]})
        found = await look(tmp_path, config=table)
    assert works(found["origin.reach"]) and found["origin.reach"].subject == cached


async def test_missing_credentials_name_the_whole_chain(
    moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links of the chain that were asked are named; and so is a profile that nobody wrote."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    url = moto.put("a.tar", BODY)
    found = (await look(tmp_path, url))["origin.credentials"]
    assert found.state == "failed" and "nothing found in the whole chain" in found.cause
    assert "anon = true" in found.remedy
    found = (await look(tmp_path, url, config='[[origin]]\nmatch = "s3://"\nprofile = "nobodys"\n'))["origin.reach"]
    assert found.state == "failed" and "nobodys" in found.found and "create the profile" in found.remedy


async def test_expired_credentials_are_to_be_renewed(faulty: FaultyS3, tmp_path: Path) -> None:
    """A store's answer to an expired token becomes the remedy to renew it."""
    faulty.access_key = "renewed"
    found = (await look(tmp_path, faulty.put("a.tar", BODY)))["origin.reach"]
    assert found.state == "failed"
    assert "expired" in found.found and "renew the daemon's credentials" in found.remedy


async def test_an_unreachable_store_names_its_table(tmp_path: Path) -> None:
    """Nothing listens there: the endpoint and the table that names it are told."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        table = (
            f'[[origin]]\nmatch = "s3://b/"\nanon = true\nendpoint_url = "http://127.0.0.1:{closed.getsockname()[1]}"\n'
        )
        found = await look(tmp_path, "s3://b/a.tar", config=table)
    assert found["origin.credentials"].found == "none: the [[origin]] table sets anon"
    reach = found["origin.reach"]
    assert reach.state == "failed" and "the [[origin]] table for s3://b/" in reach.cause
    assert "network path" in reach.remedy


async def test_missing_and_disallowed_urls_fail_by_themselves(moto: Bucket, tmp_path: Path) -> None:
    """Two urls of which one is misspelt and one outside the rules: each fails by itself."""
    missing, outside = f"{moto.url}/none.tar", "s3://other/a.tar"
    found = (await look(tmp_path, missing))["origin.reach"]
    assert found.state == "failed" and "not_found" in found.cause and "typos" in found.remedy
    found = (await look(tmp_path, outside, allow=(f"{moto.url}/",)))["origin.reach"]
    assert found.state == "failed" and "--allow" in found.remedy


async def test_doctor_warns_of_a_server_without_ranges(faulty: FaultyS3, tmp_path: Path) -> None:
    """Each shard comes in one stream, which is measured all the same."""
    faulty.ranges = False
    faulty.put("a.tar", BODY)
    found = await look(tmp_path, faulty.http_url("a.tar"), quick=False)
    assert found["origin.reach"].state == "warning" and "range requests" in found["origin.reach"].cause
    assert found["origin.speed"].figures["read_bytes"] == len(BODY)
