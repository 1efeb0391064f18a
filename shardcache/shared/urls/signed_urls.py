"""Signed urls of web servers.

A signed url has parameters that permit anyone who has it to read the object until it expires. Urls
that differ only in these parameters name the same object, so the cache leaves them out when it
identifies an object.

======================  ====================================================================
signed by               parameters
======================  ====================================================================
AWS, version 4          `X-Amz-*`
Google, version 4       `X-Goog-*`
AWS, version 2; Ceph    `AWSAccessKeyId`, `Signature`, `Expires`, `x-amz-security-token`
CloudFront              `Key-Pair-Id`, `Signature`, `Hash-Algorithm`; `Expires` or `Policy`
Google, version 2       `GoogleAccessId`, `Signature`, `Expires`
Azure (SAS)             `sv`, `sig`, `se`, `sp`, `sr` and the other fields of a token
======================  ====================================================================

The client imports this module as well, so it uses the standard library alone.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from urllib.parse import unquote


class _Signing(NamedTuple):
    """One way of signing urls; names of parameters are in lower case.

    Attributes:
        required: names of the parameters that every url signed this way has, by which it is
            recognized.
        prefix: all parameters whose names begin with it belong to the signature; empty for no such
            parameters.
        optional: names of the signature's other parameters, which a url may have.
    """

    required: frozenset[str]
    prefix: str = ""
    optional: frozenset[str] = frozenset()

    def has_parameter(self, name: str) -> bool:
        """Return whether a parameter belongs to the signature."""
        if name in self.required or name in self.optional:
            return True
        return bool(self.prefix) and name.startswith(self.prefix)


# Parameters that a SAS token may have in addition to its version and signature.
_SAS_FIELDS = frozenset(
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
# In the order of the table in the module's docstring.
_SIGNINGS = (
    # AWS, version 4
    _Signing(frozenset({"x-amz-signature", "x-amz-credential"}), prefix="x-amz-"),
    # Google, version 4
    _Signing(frozenset({"x-goog-signature", "x-goog-credential"}), prefix="x-goog-"),
    # AWS, version 2; Ceph
    _Signing(
        frozenset({"awsaccesskeyid", "signature", "expires"}),
        optional=frozenset({"x-amz-security-token"}),
    ),
    # CloudFront
    _Signing(
        frozenset({"key-pair-id", "signature"}),
        optional=frozenset({"expires", "policy", "hash-algorithm"}),
    ),
    # Google, version 2
    _Signing(frozenset({"googleaccessid", "signature", "expires"})),
    # Azure
    _Signing(frozenset({"sv", "sig"}), optional=_SAS_FIELDS),
)
_WEB = re.compile(r"https?://", re.IGNORECASE)
_BASIC_DATE = "%Y%m%dT%H%M%SZ"  # ISO 8601's basic format


class _SignedUrl(NamedTuple):
    """A signed url in two parts.

    Attributes:
        object_url: the url without its signature's parameters.
        signature: the signature's parameters, decoded, by their names in lower case.
    """

    object_url: str
    signature: Mapping[str, str]


def is_signed(url: str) -> bool:
    """Return whether a url is signed in one of the known ways."""
    return _parsed(url) is not None


def without_signature(url: str) -> str:
    """Return a url without the parameters of its signature; other urls are returned unchanged."""
    parsed = _parsed(url)
    return url if parsed is None else parsed.object_url


def expiry_s(url: str) -> float | None:
    """Return the time at which a signed url expires, in seconds since the Unix epoch.

    Return None if the url is not signed or does not state the time, and for a policy of CloudFront,
    which is not parsed.
    """
    parsed = _parsed(url)
    if parsed is None:
        return None
    try:
        return _stated_expiry_s(parsed.signature)
    except (KeyError, ValueError, OverflowError):
        return None  # a parameter is invalid, so the store will refuse the url


def _stated_expiry_s(signature: Mapping[str, str]) -> float | None:
    """Return the time at which a signature's parameters expire; None if they do not state it.

    Raises KeyError, ValueError or OverflowError if a parameter is missing or invalid.
    """
    # 1. AWS and Google, version 4: when the url was signed, and for how many seconds it is valid
    for prefix in ("x-amz-", "x-goog-"):
        if f"{prefix}date" in signature:
            signed = datetime.strptime(signature[f"{prefix}date"], _BASIC_DATE)
            valid = timedelta(seconds=int(signature[f"{prefix}expires"]))
            return (signed.replace(tzinfo=UTC) + valid).timestamp()
    # 2. AWS and Google, version 2; CloudFront: seconds since the epoch
    if "expires" in signature:
        # `int` refuses what `float` would accept, such as "nan" or "1.5".
        return float(int(signature["expires"]))
    # 3. Azure: a date
    if "se" in signature:
        until = datetime.fromisoformat(signature["se"])
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return until.timestamp()
    return None


def _parsed(url: str) -> _SignedUrl | None:
    """Return the parts of a signed url; None for any other."""
    path, question_mark, query_and_fragment = url.partition("?")
    # This comes first because there may be millions of urls, and few of them have a query.
    if not question_mark or not _WEB.match(url):
        return None
    query, hash_mark, fragment = query_and_fragment.partition("#")
    parameters = [(_name_in(text), text) for text in query.split("&")]
    names = {name for name, _ in parameters}
    signing = next((each for each in _SIGNINGS if each.required <= names), None)
    if signing is None:
        return None

    signature: dict[str, str] = {}
    object_parameters: list[str] = []  # those that do not belong to the signature
    for name, text in parameters:
        if signing.has_parameter(name):
            signature[name] = _value_in(text)
        else:
            object_parameters.append(text)
    # The text may be empty although there is a parameter: a query may end with "&".
    kept_query = "&".join(object_parameters)
    object_query = f"?{kept_query}" if kept_query else ""
    return _SignedUrl(path + object_query + hash_mark + fragment, signature)


def _name_in(parameter: str) -> str:
    """Return the name in `name=value`, decoded and in lower case."""
    name, _, _ = parameter.partition("=")
    return unquote(name).lower()


def _value_in(parameter: str) -> str:
    """Return the value in `name=value`, decoded."""
    _, _, value = parameter.partition("=")
    return unquote(value)
