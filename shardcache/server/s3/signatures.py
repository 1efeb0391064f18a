"""Signatures of AWS, version 4 (SigV4), as the server checks them.

`s3_endpoint` takes the signature out of each request, finds the key that it names, and checks it.
A signature is either in the header Authorization, or in the query of a presigned url. Some clients
sign the path and the query as they send them. Others sign the form that AWS documents, in which
everything but letters, digits, "-", ".", "_" and "~" is percent-encoded. Both are accepted, because
they mean the same request. A credential is a key's id and a scope; the scope limits a signature to
a date, a region and a service.
"""

import calendar
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from shardcache.server.s3.error_documents import S3Error

ALGORITHM = "AWS4-HMAC-SHA256"
_SKEW_S = 15 * 60  # maximum difference between the clocks of client and server
_MAX_VALID_S = 7 * 24 * 3600  # maximum validity of a presigned url
_MAX_VALID_DIGITS = len(str(_MAX_VALID_S))
_SHOWN_CHARS = 40  # number of characters of a wrong value that an error shows
_TIME_FORM = "%Y%m%dT%H%M%SZ"
_UNSIGNED = "UNSIGNED-PAYLOAD"


class SignedRequest(NamedTuple):
    """The parts of a request that its signature covers.

    Attributes:
        method: HTTP method.
        path: path as it was sent, percent-encoded.
        query: query as it was sent, without the "?".
        headers: headers by name in lower case; values of repeated headers are joined by commas.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


class Signature(NamedTuple):
    """A request's signature, with its parameters.

    Attributes:
        access_key: id of the key with which the signature was made.
        scope: date, region, service and terminator, joined by slashes.
        signed_headers: names of the headers that were signed, in their order, joined by semicolons.
        value: the signature in hexadecimal.
        time: time at which the signature was made, in the form of the header `x-amz-date`.
        valid_s: time for which a presigned url is valid; None for a signature in a header, which is
            valid within the permitted difference between clocks.
        token: session token; empty if the request has none.
        payload: the signed hash of the body, in hexadecimal, or `UNSIGNED-PAYLOAD`.
        query: query of the request, without the signature itself.
    """

    access_key: str
    scope: str
    signed_headers: str
    value: str
    time: str
    valid_s: int | None
    token: str
    payload: str
    query: str

    @classmethod
    def of(cls, request: SignedRequest) -> "Signature":
        """Return the signature of a request. Raises S3Error unless there is exactly one."""
        authorization = request.headers.get("authorization")
        is_presigned = "X-Amz-Signature=" in request.query
        if authorization is None and is_presigned:
            return cls._in_query(request)
        if authorization is None:
            raise S3Error(
                "AccessDenied",
                "the request is not signed; give the client keys: shardcache credentials",
            )
        if is_presigned:
            raise S3Error("InvalidArgument", "sign the header or the url, not both")
        return cls._in_header(request, authorization)

    def check(self, request: SignedRequest, secret_key: str, now_s: float) -> None:
        """Raise S3Error unless the request was signed with the key, and is valid now.

        Args:
            secret_key: the secret of the key that the signature names.
            now_s: the present time, in seconds since the Unix epoch.
        """
        if "host" not in self.signed_headers.split(";"):
            raise S3Error("AccessDenied", "the header Host has to be signed")
        made_s = _seconds(self.time)
        date = self.time[: len("YYYYMMDD")]
        scope_date, _, _ = self.scope.partition("/")
        if scope_date != date:
            raise S3Error(
                "SignatureDoesNotMatch",
                "the date of the credential is not that of the request; sign with today's key",
            )
        if not self._matches(request, secret_key):
            raise S3Error(
                "SignatureDoesNotMatch",
                "the signature is not that of this request with the key's secret; run "
                "shardcache credentials again, and let nothing rewrite the request",
            )
        self._check_time(made_s, now_s)

    def _check_time(self, made_s: float, now_s: float) -> None:
        """Raise S3Error unless a signature that was made at `made_s` is valid at `now_s`."""
        if self.valid_s is None:
            if abs(now_s - made_s) > _SKEW_S:
                raise S3Error(
                    "RequestTimeTooSkewed",
                    "the request was signed more than 15 minutes from now; set the clock",
                )
            return
        if made_s - now_s > _SKEW_S:
            raise S3Error("AccessDenied", "the presigned url is not valid yet; set the clock")
        if now_s > made_s + self.valid_s:
            raise S3Error("AccessDenied", "the presigned url has expired; sign another")

    @classmethod
    def _in_header(cls, request: SignedRequest, authorization: str) -> "Signature":
        """Return the signature in the header Authorization. Raises S3Error."""
        # Most requests of a client differ only in the signature's value, at the end. What precedes
        # it is parsed by a function that caches its results.
        beginning, separator, value = authorization.rpartition("Signature=")
        if not separator:
            beginning = authorization  # parse it first: another fault in it has a better error
        access_key, scope, signed_headers = _parse_beginning(beginning)
        if not separator or "," in value:
            raise _malformed("the header Authorization has to end with Signature=")
        headers = request.headers
        return cls(
            access_key,
            scope,
            signed_headers,
            value=value.strip(),
            time=headers.get("x-amz-date", ""),
            valid_s=None,
            token=headers.get("x-amz-security-token", ""),
            payload=headers.get("x-amz-content-sha256", _UNSIGNED),
            query=request.query,
        )

    @classmethod
    def _in_query(cls, request: SignedRequest) -> "Signature":
        """Return the signature of a presigned url. Raises S3Error."""
        pairs = request.query.split("&")
        fields = {}
        for pair in pairs:
            name, value = _split_field(pair)
            fields[name] = _unquoted(value)
        if fields.get("X-Amz-Algorithm") != ALGORITHM:
            raise _malformed_query(f"only {ALGORITHM} is known here")
        access_key, scope = _parse_credential(fields.get("X-Amz-Credential", ""))
        unsigned = [pair for pair in pairs if not pair.startswith("X-Amz-Signature=")]
        return cls(
            access_key,
            scope,
            signed_headers=fields.get("X-Amz-SignedHeaders", ""),
            value=fields.get("X-Amz-Signature", ""),
            time=fields.get("X-Amz-Date", ""),
            valid_s=_parse_validity(fields.get("X-Amz-Expires", "")),
            token=fields.get("X-Amz-Security-Token", ""),
            payload=request.headers.get("x-amz-content-sha256", _UNSIGNED),
            query="&".join(unsigned),
        )

    def _matches(self, request: SignedRequest, secret_key: str) -> bool:
        """Return whether the request, in either form that clients sign, has this signature."""
        # 1. Path and query as they were sent.
        sent_pairs = [_with_value(pair) for pair in self.query.split("&") if pair]
        sent_pairs.sort(key=_split_field)
        if self._is_signature_of(request, request.path, sent_pairs, secret_key):
            return True

        # 2. Path and query in the form that AWS documents, if that form differs.
        path = _normalized(request.path, safe="/~")
        pairs = [_normalized_pair(pair) for pair in sent_pairs]
        pairs.sort(key=_split_field)
        if path == request.path and pairs == sent_pairs:
            return False
        return self._is_signature_of(request, path, pairs, secret_key)

    def _is_signature_of(
        self,
        request: SignedRequest,
        path: str,
        query_pairs: Sequence[str],
        secret_key: str,
    ) -> bool:
        """Return whether the request, with this path and query, has this signature.

        Args:
            query_pairs: the query's parameters, each as `NAME=VALUE`, in sorted order.
        """
        header_lines = []
        for name in self.signed_headers.split(";"):
            words = request.headers.get(name, "").split()
            header_lines.append(f"{name}:{' '.join(words)}\n")
        # SigV4 hashes the canonical request, and signs a string with this hash.
        canonical_request = "\n".join(
            [
                request.method,
                path,
                "&".join(query_pairs),
                "".join(header_lines),
                self.signed_headers,
                self.payload,
            ]
        )
        digest = hashlib.sha256(_bytes(canonical_request)).hexdigest()
        string_to_sign = f"{ALGORITHM}\n{self.time}\n{self.scope}\n{digest}"
        expected = _signer(secret_key, self.scope).copy()
        expected.update(_bytes(string_to_sign))
        return hmac.compare_digest(expected.hexdigest().encode(), _bytes(self.value))


@lru_cache(1024)
def _signer(secret_key: str, scope: str) -> hmac.HMAC:
    """Return an HMAC with the key for one day, region and service.

    The result is cached: a caller must copy it before updating it.
    """
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, _bytes(part), "sha256")
    return hmac.new(key, digestmod="sha256")


@lru_cache(1024)
def _parse_beginning(text: str) -> tuple[str, str, str]:
    """Return the key's id, the scope and the signed headers of an Authorization header.

    Raises S3Error.

    Args:
        text: the header up to `Signature=`.
    """
    algorithm, _, field_list = text.partition(" ")
    if algorithm != ALGORITHM:
        raise _malformed(f"only {ALGORITHM} is known here, not {algorithm[:_SHOWN_CHARS]!r}")
    fields = dict(_split_field(field) for field in field_list.split(","))
    access_key, scope = _parse_credential(fields.get("Credential", ""))
    return access_key, scope, fields.get("SignedHeaders", "")


@lru_cache(64)
def _seconds(text: str) -> float:
    """Return the time in `x-amz-date`, in seconds since the Unix epoch. Raises S3Error."""
    try:
        return calendar.timegm(time.strptime(text, _TIME_FORM))
    except ValueError:
        raise _malformed("the header x-amz-date has to say when it was signed") from None


def _parse_credential(text: str) -> tuple[str, str]:
    """Return the key's id and the scope of a credential. Raises S3Error."""
    access_key, _, scope = text.partition("/")
    match scope.split("/"):
        case [_date, _region, "s3", "aws4_request"]:
            return access_key, scope
    raise _malformed("the credential has to end with DATE/REGION/s3/aws4_request")


def _parse_validity(text: str) -> int:
    """Return the number of seconds in `X-Amz-Expires`. Raises S3Error."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_VALID_DIGITS
    if not is_number or int(text) > _MAX_VALID_S:
        raise _malformed_query(
            f"X-Amz-Expires has to be a number of seconds, {_MAX_VALID_S} at most"
        )
    return int(text)


def _split_field(text: str) -> tuple[str, str]:
    """Return name and value of `NAME=VALUE`, without the spaces around them."""
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def _with_value(pair: str) -> str:
    """Return a query's parameter with an `=`, which is signed even if there is no value."""
    return pair if "=" in pair else f"{pair}="


def _normalized_pair(pair: str) -> str:
    """Return a query's parameter in the percent-encoding that AWS documents."""
    # In a query, "+" is a space, which clients sign as "%20"; a plus is sent as "%2B".
    name, _, value = pair.replace("+", " ").partition("=")
    return f"{_normalized(name)}={_normalized(value)}"


def _normalized(text: str, safe: str = "~") -> str:
    """Return text in the percent-encoding that AWS documents.

    Args:
        safe: characters that are not encoded, besides letters, digits, "-", "." and "_".
    """
    return quote(unquote_to_bytes(_bytes(text)), safe=safe)


def _unquoted(text: str) -> str:
    """Return text without its percent-encoding."""
    return unquote_to_bytes(_bytes(text)).decode(errors="replace")


def _bytes(text: str) -> bytes:
    """Return the bytes of a text in a request's head, exactly as they were sent."""
    return text.encode("utf-8", "surrogateescape")


def _malformed(message: str) -> S3Error:
    """Return S3's error for a malformed signature in a header."""
    return S3Error("AuthorizationHeaderMalformed", message)


def _malformed_query(message: str) -> S3Error:
    """Return S3's error for a malformed signature in a presigned url."""
    return S3Error("AuthorizationQueryParametersError", message)
