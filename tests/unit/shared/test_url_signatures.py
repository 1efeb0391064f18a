"""Signatures of urls: which parameters they are, and when they expire."""

import pytest

from shardcache.shared.urls.signed_urls import expiry_s, is_signed, without_signature
from shardcache.store.keys import place_of, stored_url

PLACE = "https://host/a%20b/c.tar"
AWS4 = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F20260102%2Fr%2Fs3%2Faws4_request"
    "&X-Amz-Date=20260102T030405Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host"
    "&X-Amz-Security-Token=t%2B&X-Amz-Signature=0a"
)
GOOGLE4 = "X-Goog-Credential=a&X-Goog-Date=20260102T030405Z&X-Goog-Expires=60&X-Goog-Signature=0a"
SAS = (
    "sv=2024-11-04&st=2026-01-01T00%3A00%3A00Z&se=2026-01-02T03%3A05%3A05Z"
    "&sr=b&sp=r&spr=https&sig=x%2Fy%3D"
)
UNTIL_S = 1767323105.0  # 2026-01-02 03:05:05 UTC


@pytest.mark.parametrize(
    ("query", "until_s"),
    [
        (AWS4, UNTIL_S),
        (AWS4.lower().replace("t030405z", "T030405Z"), UNTIL_S),
        (GOOGLE4, UNTIL_S),
        (SAS, UNTIL_S),
        (SAS.replace("T03%3A05%3A05Z", ""), 1767312000.0),
        ("AWSAccessKeyId=K&Expires=1767323105&Signature=x%3D", UNTIL_S),
        ("GoogleAccessId=me%40x&Expires=1767323105&Signature=x%3D", UNTIL_S),
        ("Expires=1767323105&Signature=x&Key-Pair-Id=K", UNTIL_S),
        ("Policy=e30_&Signature=x&Key-Pair-Id=K", None),
        (AWS4.replace("Expires=60", "Expires=soon"), None),
    ],
)
def test_signature_is_no_part_of_an_objects_url(query: str, until_s: float | None) -> None:
    """All of its parameters are left out, between others as well, and its expiry is read."""
    url = f"{PLACE}?{query}"
    assert is_signed(url)
    assert without_signature(url) == stored_url(url) == PLACE
    assert expiry_s(url) == until_s
    bare = without_signature(f"{PLACE}?versionId=1&{query}&download=true")
    assert bare == f"{PLACE}?versionId=1&download=true"
    assert without_signature(f"{url}&") == PLACE


@pytest.mark.parametrize(
    "url",
    [
        f"{PLACE}?sig=1",
        f"{PLACE}?Expires=1&Signature=x",
        f"{PLACE}?X-Amz-Date=20260102T030405Z",
        f"{PLACE}?sv=1&se=2",
        f"s3://bucket/c.tar?{AWS4}",
        PLACE,
    ],
)
def test_other_urls_are_not_signed(url: str) -> None:
    """They are names of their own, whatever parameters they have."""
    assert not is_signed(url)
    assert without_signature(url) == place_of(url, is_file=False) == url
    assert expiry_s(url) is None


def test_signed_and_bare_url_are_two_places() -> None:
    """A signature's permission does not extend to a url without one."""
    first = f"{PLACE}?{AWS4}"
    second = f"{PLACE}?{AWS4.replace('=0a', '=0b')}"
    assert place_of(first, is_file=True) == place_of(second, is_file=True)
    assert place_of(first, is_file=True) not in (place_of(PLACE, is_file=True), PLACE)
    assert place_of(f"{PLACE}.gz?{AWS4}", is_file=True) != place_of(
        f"{PLACE}.gz?{AWS4}", is_file=False
    )
