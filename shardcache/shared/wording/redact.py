"""Redaction of secrets in urls, and escaping of terminal control characters.

A signed url grants access to its object, or even to a whole container, to anyone who sees the url.
The complete url is used only to fetch the object and to compute its hash. Before a url is shown or
stored, its secrets are replaced here.
"""

import re

HIDDEN = "REDACTED"

# Query parameters of AWS (versions 4 and 2), Google, Azure (SAS), CloudFront, and common names for
# secrets.
_SECRET_NAMES = (
    r"x-(?:amz|goog|ms|oss|cos)-(?:signature|credential|security-token)"
    r"|ossaccesskeyid|awsaccesskeyid|googleaccessid"
    r"|signature|sig|policy|(?:\w+[-_])?(?:token|secret|password|passwd|pwd)|auth"
    r"|(?:api|access|account|secret|subscription)[-_]?key"
)
# A parameter ends at the next parameter, at the end of the url, or at a quotation mark.
_SECRET = re.compile(rf"([?&;#](?:{_SECRET_NAMES})=)[^\s&;#'\"<>]+", re.IGNORECASE)
# `excerpt` reads only this number of characters of a text, which may be of any length.
_MAX_READ_CHARS = 8192
# C0 and C1 controls, line separators, and bidirectional overrides.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# A url's user name and password. A match ends before the next "://": if each match could extend
# further, a text with thousands of urls would take minutes.
_USERINFO = re.compile(
    r"""
    (?<!github)(://)                # in GitHub's org:repo@ref, there is no password
    (?!arn:)                        # nor in an ARN
    [^\s/@:\[{'"]*:                 # the user name; "[" would begin an IPv6 address
    (?!\d{0,5}(?:[/?#\s'"]|$))      # a port would end here
    (?:(?!://)[^\s@'"])*@           # the password, which may contain slashes, as AWS's often do
    """,
    re.VERBOSE,
)


def redact(text: str) -> str:
    """Return a url, or a text that contains urls, without passwords, signatures and tokens."""
    if "=" in text:
        text = _SECRET.sub(rf"\1{HIDDEN}", text)
    if "@" in text:
        text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    return text


def printable(text: str) -> str:
    """Return untrusted text, such as a job's name, on one line, with control characters escaped."""
    return _CONTROLS.sub(lambda control: ascii(control[0]).strip("'"), text)


def excerpt(text: str, max_chars: int = 500) -> str:
    """Return untrusted text for a message: redacted, printable, and at most `max_chars` long.

    The middle of a longer text is left out. Surrogates, which stand for bytes that could not be
    decoded, are escaped as well: JSON in UTF-8 cannot carry them.
    """
    encodable = text[:_MAX_READ_CHARS].encode(errors="backslashreplace").decode()
    shown = printable(redact(encodable))
    if len(shown) <= max_chars:
        return shown
    tail_chars = max_chars // 5
    head_chars = max_chars - tail_chars - 1
    return f"{shown[:head_chars]}…{shown[-tail_chars:]}"
