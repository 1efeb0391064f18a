"""Signatures of S3 requests: AWS's and botocore's are accepted, all others refused."""

import calendar
import hmac
import time
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.signatures import Signature, SignedRequest

# "Authenticating Requests: Using the Authorization Header", and "Query Parameters", in the S3 API
# reference.
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
AWS_HOST = "examplebucket.s3.amazonaws.com"
AWS_NOW_S = calendar.timegm((2013, 5, 24, 0, 0, 0))
AWS_HASH = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
AWS_CREDENTIAL = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"

GET_OBJECT = SignedRequest(
    "GET",
    "/test.txt",
    "",
    {
        "host": AWS_HOST,
        "range": "bytes=0-9",
        "x-amz-content-sha256": AWS_HASH,
        "x-amz-date": "20130524T000000Z",
        "authorization": f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},"
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    },
)
LIST_OBJECTS = SignedRequest(
    "GET",
    "/",
    "max-keys=2&prefix=J",
    {
        "host": AWS_HOST,
        "x-amz-content-sha256": AWS_HASH,
        "x-amz-date": "20130524T000000Z",
        "authorization": f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},"
        "SignedHeaders=host;x-amz-content-sha256;x-amz-date,"
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    },
)
PRESIGNED = SignedRequest(
    "GET",
    "/test.txt",
    "X-Amz-Algorithm=AWS4-HMAC-SHA256"
    "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
    "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
    {"host": AWS_HOST},
)
PUBLISHED = [GET_OBJECT, LIST_OBJECTS, PRESIGNED]

SECRET = "a secret/key+of=ours"
KEY = "SHARDCACHE0000"
PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30)


def check(request: SignedRequest, secret: str = AWS_SECRET, now_s: float = AWS_NOW_S) -> Signature:
    """Check a request's signature; return it."""
    signature = Signature.of(request)
    signature.check(request, secret, now_s)
    return signature


def code_of(request: SignedRequest, secret: str = AWS_SECRET, now_s: float = AWS_NOW_S) -> str:
    """Return the code with which a request is refused."""
    with pytest.raises(S3Error) as refused:
        check(request, secret, now_s)
    return refused.value.code


def signed_by_botocore(url: str, presigned_s: int | None = None, **headers: str) -> SignedRequest:
    """Return a request as a server gets it from botocore."""
    request = AWSRequest("GET", url, headers=headers)
    credentials = Credentials(KEY, SECRET)
    if presigned_s is None:
        S3SigV4Auth(credentials, "s3", "eu-central-1").add_auth(request)
    else:
        S3SigV4QueryAuth(credentials, "s3", "eu-central-1", expires=presigned_s).add_auth(request)
    prepared = request.prepare()
    target = prepared.url.partition("//")[2].partition("/")
    path, _, query = target[2].partition("?")
    fields = {name.lower(): _text(value) for name, value in prepared.headers.items()}
    return SignedRequest("GET", f"/{path}", query, {"host": target[0], **fields})


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("request_", PUBLISHED)
def test_signatures_that_aws_publishes_are_accepted(request_: SignedRequest) -> None:
    """With the key of the documentation, at the time of the documentation."""
    assert check(request_).access_key == "AKIAIOSFODNN7EXAMPLE"


@pytest.mark.parametrize("request_", PUBLISHED)
def test_another_secret_is_refused(request_: SignedRequest) -> None:
    """Whoever has no key of the daemon cannot sign."""
    assert code_of(request_, secret="another") == "SignatureDoesNotMatch"


@pytest.mark.parametrize("request_", PUBLISHED)
def test_a_changed_request_is_refused(request_: SignedRequest) -> None:
    """Method, path, query and signed headers are part of the signature."""
    changed = [
        request_._replace(method="HEAD"),
        request_._replace(path="/other.txt"),
        request_._replace(query=f"{request_.query}&partNumber=1"),
        request_._replace(headers={**request_.headers, "host": "other"}),
    ]
    assert {code_of(each) for each in changed} == {"SignatureDoesNotMatch"}


@pytest.mark.parametrize("late_s", [-1000.0, 1000.0])
def test_a_request_of_another_time_is_refused(late_s: float) -> None:
    """A quarter of an hour is what clocks may differ."""
    assert code_of(GET_OBJECT, now_s=AWS_NOW_S + late_s) == "RequestTimeTooSkewed"


def test_a_presigned_url_is_valid_as_long_as_it_says() -> None:
    """And a second longer it is not, nor long before it was made."""
    assert check(PRESIGNED, now_s=AWS_NOW_S + 86_400).valid_s == 86_400
    assert code_of(PRESIGNED, now_s=AWS_NOW_S + 86_401) == "AccessDenied"
    assert code_of(PRESIGNED, now_s=AWS_NOW_S - 3600) == "AccessDenied"


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "AccessDenied"),
        ("", "AuthorizationHeaderMalformed"),
        ("AWS AKIAIOSFODNN7EXAMPLE:c2lnbmVk", "AuthorizationHeaderMalformed"),
        ("Bearer token", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=a/b/c", "AuthorizationHeaderMalformed"),
        (
            "AWS4-HMAC-SHA256 Credential=AKIA/20130524/us-east-1/iam/aws4_request",
            "AuthorizationHeaderMalformed",
        ),
        (f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL}", "AuthorizationHeaderMalformed"),
        (
            f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},SignedHeaders=x-amz-date,Signature=00",
            "AccessDenied",
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},SignedHeaders=host,Signature=é",
            "SignatureDoesNotMatch",
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},SignedHeaders=host",
            "AuthorizationHeaderMalformed",
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},Signature=00,SignedHeaders=host",
            "AuthorizationHeaderMalformed",
        ),
    ],
)
def test_other_authorizations_are_refused(authorization: str | None, code: str) -> None:
    """None, of another kind, without its parts, or for another service."""
    headers = {name: text for name, text in GET_OBJECT.headers.items() if name != "authorization"}
    if authorization is not None:
        headers["authorization"] = authorization
    assert code_of(GET_OBJECT._replace(headers=headers)) == code


@pytest.mark.parametrize("stated", ["", "yesterday", "2013-05-24T00:00:00Z", "99999999T999999Z"])
def test_a_request_without_its_time_is_refused(stated: str) -> None:
    """A signature without a time would be valid for ever."""
    headers = {**GET_OBJECT.headers, "x-amz-date": stated}
    assert code_of(GET_OBJECT._replace(headers=headers)) == "AuthorizationHeaderMalformed"


@pytest.mark.parametrize("lasting", ["", "-1", "604801", "1e9", "٣"])
def test_a_presigned_url_has_to_end_within_a_week(lasting: str) -> None:
    """S3 has the same limit."""
    query = PRESIGNED.query.replace("X-Amz-Expires=86400", f"X-Amz-Expires={lasting}")
    assert code_of(PRESIGNED._replace(query=query)) == "AuthorizationQueryParametersError"


class _AuthOfDay(S3SigV4Auth):
    """Signs with the signing key of a day."""

    day = ""  # that of the request, if none is named

    def credential_scope(self, request: AWSRequest) -> str:
        day = self.day or request.context["timestamp"][:8]
        return f"{day}/us-east-1/s3/aws4_request"

    def scope(self, request: AWSRequest) -> str:
        return f"{KEY}/{self.credential_scope(request)}"

    def signature(self, string_to_sign: str, request: AWSRequest) -> str:
        key = f"AWS4{SECRET}".encode()
        for part in self.credential_scope(request).split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.digest(key, string_to_sign.encode(), "sha256").hex()


class _AuthOfOldDay(_AuthOfDay):
    day = "20200101"


@pytest.mark.parametrize(("auth", "is_valid"), [(_AuthOfDay, True), (_AuthOfOldDay, False)])
def test_a_signing_key_is_for_one_day(auth: type[_AuthOfDay], is_valid: bool) -> None:
    """A key that leaked on another day signs nothing of today."""
    http = AWSRequest("GET", "http://127.0.0.1:9099/bucket/key")
    auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(http)
    fields = {name.lower(): _text(value) for name, value in http.prepare().headers.items()}
    request = SignedRequest("GET", "/bucket/key", "", {"host": "127.0.0.1:9099", **fields})
    if is_valid:
        assert check(request, SECRET, time.time()).access_key == KEY
    else:
        assert code_of(request, SECRET, time.time()) == "SignatureDoesNotMatch"


@given(name=PATHS, value=PATHS, presigned_s=st.sampled_from([None, 60]))
def test_requests_signed_by_botocore_are_accepted(
    name: str, value: str, presigned_s: int | None
) -> None:
    """Paths, queries and headers of any text, signed in the headers or in the url."""
    query = f"?prefix={quote(value, safe='')}&list-type=2&empty"
    url = f"http://127.0.0.1:9099/bucket/{quote(name, safe='/~')}{'' if presigned_s else query}"
    request = signed_by_botocore(url, presigned_s, **{"X-Amz-Meta-Odd": "  two   words "})
    assert check(request, SECRET, time.time()).access_key == KEY
    code = code_of(request._replace(path=f"{request.path}x"), SECRET, time.time())
    assert code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("sent_path", "sent_query"),
    [
        ("/bucket/a=b+c,d", "prefix=a/b"),
        ("/bucket/%61=b%2Bc%2cd", "prefix=a%2fb"),
        ("/bucket/a%3Db%2Bc%2Cd", ""),
    ],
)
def test_the_documented_encoding_is_accepted_for_whatever_was_sent(
    sent_path: str, sent_query: str
) -> None:
    """SDKs sign the encoded form of what they send in another one."""
    query = "?prefix=a%2Fb" if sent_query else ""
    request = signed_by_botocore(f"http://127.0.0.1:9099/bucket/a%3Db%2Bc%2Cd{query}")
    sent = request._replace(path=sent_path, query=sent_query)
    assert check(sent, SECRET, time.time()).access_key == KEY


@pytest.mark.parametrize(("signed", "is_valid"), [("a%20b", True), ("a%2Bb", False)])
def test_a_plus_in_a_query_is_signed_as_the_space_that_it_is(signed: str, is_valid: bool) -> None:
    """The endpoint reads a space, so a signed plus would list another prefix."""
    request = signed_by_botocore(f"http://127.0.0.1:9099/bucket?prefix={signed}")
    changed = request._replace(query="prefix=a+b")
    if is_valid:
        assert check(changed, SECRET, time.time()).access_key == KEY
    else:
        assert code_of(changed, SECRET, time.time()) == "SignatureDoesNotMatch"
