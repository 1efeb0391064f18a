"""Errors in S3's form: a status, a code that clients know, and a message with the remedy.

`s3_endpoint` turns each error of a request into an `S3Error`, and sends its document.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from shardcache.shared import exceptions
from shardcache.shared.exceptions import ShardcacheError

_STATUS_OF_CODE = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "ExpiredToken": 403,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidBucketName": 400,
    "InvalidPartNumber": 416,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidToken": 400,
    "InvalidURI": 400,
    "KeyTooLongError": 400,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}
# S3's codes by class of error; the first row that fits is used. All other errors are internal.
_CODE_OF_ERROR: dict[type[ShardcacheError], str] = {
    exceptions.NotFoundError: "NoSuchKey",
    exceptions.AccessDeniedError: "AccessDenied",
    exceptions.NotAllowedError: "AccessDenied",
    exceptions.OutdatedError: "PreconditionFailed",
    exceptions.ConfigError: "InvalidRequest",
    exceptions.ProtocolError: "InvalidRequest",
    exceptions.StoppingError: "SlowDown",
    exceptions.ExhaustedError: "SlowDown",
    exceptions.OriginUnavailableError: "ServiceUnavailable",
    exceptions.ShardChangedError: "ServiceUnavailable",
    exceptions.CacheError: "ServiceUnavailable",
    # The object store refuses the request, and would refuse it again.
    exceptions.OriginError: "InvalidRequest",
}


@dataclass(slots=True)
class S3Error(Exception):
    """The refusal of a request, in the form in which S3 refuses requests.

    Attributes:
        code: one of the codes that S3's clients know.
        message: the reason, and the remedy.
        headers: further headers of the answer.
    """

    code: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The answer's HTTP status."""
        return _STATUS_OF_CODE[self.code]

    @classmethod
    def of(cls, exn: ShardcacheError) -> "S3Error":
        """Return one of the daemon's own errors in S3's form."""
        message = exn.message
        if exn.remedy:
            message = f"{message}; {exn.remedy}"
        return cls(_code_of(exn), message)

    def document(self, resource: str, request_id: str) -> bytes:
        """Return S3's error document, which is XML.

        Args:
            resource: path of the request.
            request_id: id of the request, as in the answer's headers.
        """
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{self.code}</Code><Message>{escape_xml(self.message)}</Message>"
            f"<Resource>{escape_xml(resource)}</Resource><RequestId>{request_id}</RequestId></Error>"
        ).encode()


def _code_of(exn: ShardcacheError) -> str:
    """Return S3's code for one of the daemon's own errors."""
    for error_class, code in _CODE_OF_ERROR.items():
        if isinstance(exn, error_class):
            return code
    return "InternalError"


def escape_xml(text: str) -> str:
    """Return text escaped for XML, with U+FFFD in place of characters that XML cannot hold."""
    valid = "".join(char if _is_valid_in_xml(char) else "\ufffd" for char in text)
    # A parser would read a carriage return as a line feed.
    return escape(valid, {"\r": "&#13;"})


def _is_valid_in_xml(char: str) -> bool:
    """Return whether XML 1.0 may hold a character."""
    return (
        char in "\t\n\r"
        or "\x20" <= char <= "\ud7ff"
        or "\ue000" <= char <= "\ufffd"
        or char > "\uffff"
    )
