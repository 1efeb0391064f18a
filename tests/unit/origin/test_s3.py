"""Urls that are made after the SDK's pattern are the SDK's own, signature included."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.origin.s3.s3_sessions import SdkSessions
from shardcache.origin.s3.s3_signing import BEHIND_TIER, SIGNED_FOR_S, Signer

_KEYS = {"key": "AK/ID", "secret": "SECRET", "client_kwargs": {"region_name": "eu-west-3"}}
_HEADERS = {"x-amz-checksum-mode": "ENABLED"}
# Path style; a bucket in the host; a bucket that cannot be, for its dots; credentials that expire;
# none at all.
PLAIN = [
    ("bucket", {**_KEYS, "endpoint_url": "http://127.0.0.1:9999"}),
    ("bucket", _KEYS),
    ("a.bucket", _KEYS),
    ("bucket", {**_KEYS, "token": "TOKEN=/+"}),
    ("bucket", {"anon": True, "endpoint_url": "https://store.example:444/base"}),
]
OBJECTS = [
    "a.tar",
    "train/a b+c.tar",
    "ü/%41~(1)'.tar",
    "/leading//double/../dots.tar",
    "q?x=1&X-Amz-Date=2#f",
]


async def _same_second(
    fs: Any, signer: Signer, operation: str, params: dict[str, str]
) -> tuple[str, str]:
    """Return the url of the SDK and ours, signed at the same time."""
    headers: dict[str, str] = {}
    told: dict[str, str] = {}
    if operation == "head_object":
        headers = _HEADERS
        told = {"ChecksumMode": "ENABLED"}
    while True:
        wanted = await fs.s3.generate_presigned_url(
            operation, Params=params | told, ExpiresIn=SIGNED_FOR_S
        )
        found = await signer.url(fs, operation, params | told, headers)
        dates = [parse_qs(urlsplit(url).query).get("X-Amz-Date") for url in (wanted, found)]
        if dates[0] == dates[1]:
            return wanted, found


def _parts(url: str) -> tuple[str, dict[str, list[str]]]:
    return url.partition("?")[0], parse_qs(urlsplit(url).query)


@pytest.mark.parametrize("operation", ["get_object", "head_object"])
@pytest.mark.parametrize(("bucket", "options"), PLAIN)
async def test_urls_are_those_of_the_sdk(
    bucket: str, options: dict[str, Any], operation: str
) -> None:
    """Whatever the object's name; and from the second on the SDK is not asked for them."""
    sessions = SdkSessions(OriginTable(match="s3://*", storage_options=options), 4)
    signer = Signer()
    asked = []
    async with sessions.use("s3://bucket/a.tar") as fs:
        await signer.url(
            fs, operation, {"Bucket": bucket, "Key": "first.tar", "VersionId": "1"}, {}
        )
        for key in OBJECTS:
            for version in ({}, {"VersionId": "a+b/c=~d"}):
                params = {"Bucket": bucket, "Key": key, **version}
                wanted, found = await _same_second(fs, signer, operation, params)
                assert _parts(found) == _parts(wanted)
        fs.s3.meta.events.register(
            "provide-client-params.s3.*", lambda **event: asked.append(event)
        )
        await signer.url(fs, operation, {"Bucket": bucket, "Key": "last.tar"}, {})
    await sessions.close()
    assert asked == []


async def test_nodes_behind_a_tier_sign_the_same_url_within_an_hour() -> None:
    """Those with the same credentials, from the first object on; nobody else has the signature."""
    dates: set[str] = set()
    while len(dates) != 1:  # an hour may end in between
        signed = []
        for secret in ("SECRET", "SECRET", "ANOTHER"):
            table = OriginTable(match="s3://*", storage_options={**_KEYS, "secret": secret})
            sessions = SdkSessions(table, 4)
            async with sessions.use("s3://bucket/a.tar") as fs:
                url = await Signer(BEHIND_TIER).url(
                    fs, "get_object", {"Bucket": "bucket", "Key": "a.tar"}, {}
                )
            await sessions.close()
            signed.append(parse_qs(urlsplit(url).query))
        dates = {fields["X-Amz-Date"][0] for fields in signed}
    assert dates.pop().endswith("0000Z")
    assert signed[0] == signed[1]
    assert signed[0].pop("X-Amz-Signature") != signed[2].pop("X-Amz-Signature")
    assert signed[0] == signed[2]


async def test_each_filesystem_signs_for_itself() -> None:
    """Credentials that a store takes no longer are not signed with any more."""
    signer = Signer()
    for access_key in ("first", "second"):
        sessions = SdkSessions(
            OriginTable(match="s3://*", storage_options={**_KEYS, "key": access_key}), 4
        )
        async with sessions.use("s3://bucket/a.tar") as fs:
            for key in OBJECTS[:2]:
                url = await signer.url(fs, "get_object", {"Bucket": "bucket", "Key": key}, {})
                assert parse_qs(urlsplit(url).query)["X-Amz-Credential"][0].startswith(access_key)
        await sessions.close()


async def test_access_points_of_all_regions_are_signed_by_the_sdk() -> None:
    """An access point of all regions is signed for another way, each time by the SDK."""
    arn = "arn:aws:s3::123456789012:accesspoint/abc.mrap"
    sessions = SdkSessions(OriginTable(match="s3://*", storage_options=_KEYS), 4)
    signer = Signer()
    async with sessions.use("s3://bucket/a.tar") as fs:
        for key in OBJECTS[:2]:
            url = await signer.url(fs, "get_object", {"Bucket": arn, "Key": key}, {})
            assert "AWS4-ECDSA-P256-SHA256" in url
    await sessions.close()
