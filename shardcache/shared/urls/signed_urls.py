"""Signed urls of web servers: their parameters, without which urls name one and the same object.

======================  ====================================================================
signed by               parameters
======================  ====================================================================
AWS, version 4          `X-Amz-*`
AWS, version 2; Ceph    `AWSAccessKeyId`, `Signature`, `Expires`, `x-amz-security-token`
CloudFront              `Key-Pair-Id`, `Signature`, `Expires` or `Policy`, `Hash-Algorithm`
Google, version 4       `X-Goog-*`
Google, version 2       `GoogleAccessId`, `Signature`, `Expires`
Azure (SAS)             `sv`, `sig`, `se`, `sp`, `sr` and the other fields of a token
======================  ====================================================================

Whoever has such a url may read the object until it expires. The standard library alone.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from urllib.parse import unquote


class _Signing(NamedTuple):
    """One way of signing urls; names of parameters are in lower case.

    Attributes:
        marks: parameters that every url signed this way has.
        prefix: of the names of all its parameters; empty if they have none in common.
        others: its parameters that do not begin so.
    """

    marks: frozenset[str]
    prefix: str = ""
    others: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Return whether a parameter is of the signature."""
        if name in self.marks or name in self.others:
            return True
        return bool(self.prefix) and name.startswith(self.prefix)


# Fields of a SAS token besides its version and signature.
_OF_SAS = frozenset(
    {
        "se",
        "sp",
        "st",
        "sr",
        "spr",
        "sip",
        "si",
        "ss",
        "srt",
        "sdd",
        "ses",
        "saoid",
        "suoid",
        "scid",
        "skoid",
        "sktid",
        "skt",
        "ske",
        "sks",
        "skv",
    }
)
_SIGNINGS = (
    _Signing(frozenset({"x-amz-signature", "x-amz-credential"}), "x-amz-"),
    _Signing(frozenset({"x-goog-signature", "x-goog-credential"}), "x-goog-"),
    _Signing(
        frozenset({"awsaccesskeyid", "signature", "expires"}),
        others=frozenset({"x-amz-security-token"}),
    ),
    _Signing(
        frozenset({"key-pair-id", "signature"}),
        others=frozenset({"expires", "policy", "hash-algorithm"}),
    ),
    _Signing(frozenset({"googleaccessid", "signature", "expires"})),
    _Signing(frozenset({"sv", "sig"}), others=_OF_SAS),
)
_WEB = re.compile(r"https?://", re.IGNORECASE)
_BASIC_DATE = "%Y%m%dT%H%M%SZ"


class _SignedUrl(NamedTuple):
    """A url in parts.

    Attributes:
        object_url: the url without its signature's parameters.
        signature: these parameters, decoded, by their names in lower case.
    """

    object_url: str
    signature: Mapping[str, str]


def is_signed(url: str) -> bool:
    """Return whether a url is signed in one of the known ways."""
    return _parsed(url) is not None


def without_signature(url: str) -> str:
    """Return a url without the parameters of its signature; one that is not signed, unchanged."""
    found = _parsed(url)
    return url if found is None else found.object_url


def expiry_s(url: str) -> float | None:
    """Return when a signed url expires, in seconds since the Unix epoch; None if it does not say.

    A policy of CloudFront is not read.
    """
    found = _parsed(url)
    if found is None:
        return None
    fields = found.signature
    try:
        for prefix in ("x-amz-", "x-goog-"):
            if f"{prefix}date" in fields:
                signed = datetime.strptime(fields[f"{prefix}date"], _BASIC_DATE)
                valid = timedelta(seconds=int(fields[f"{prefix}expires"]))
                return (signed.replace(tzinfo=UTC) + valid).timestamp()
        if "expires" in fields:
            return float(int(fields["expires"]))
        if "se" in fields:
            until = datetime.fromisoformat(fields["se"])
            if until.tzinfo is None:
                until = until.replace(tzinfo=UTC)
            return until.timestamp()
    except (KeyError, ValueError, OverflowError):
        pass  # it is up to the store to refuse it
    return None


def _parsed(url: str) -> _SignedUrl | None:
    """Return the parts of a signed url; None for any other."""
    path, mark, query = url.partition("?")
    if not mark or not _WEB.match(url):  # of millions of urls, few have a query
        return None
    query, hash_mark, fragment = query.partition("#")
    parameters = [(text, _name(text)) for text in query.split("&")]
    names = {name for _, name in parameters}
    signing = next((each for each in _SIGNINGS if each.marks <= names), None)
    if signing is None:
        return None
    kept = "&".join(text for text, name in parameters if not signing.has(name))
    kept_query = f"?{kept}" if kept else ""
    object_url = path + kept_query + hash_mark + fragment
    signature = {name: _value(text) for text, name in parameters if signing.has(name)}
    return _SignedUrl(object_url, signature)


def _name(parameter: str) -> str:
    name, _, _ = parameter.partition("=")
    return unquote(name).lower()


def _value(parameter: str) -> str:
    _, _, value = parameter.partition("=")
    return unquote(value)
