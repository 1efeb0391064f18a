"""What must not be shown of a text: the secrets that urls carry, and what a terminal would obey.

A signed url opens its object, and sometimes a whole container, to whoever reads it. It is fetched and named by its
hash as it stands; wherever a url is shown or written down, these parts of it are left out. Pure.
"""

from __future__ import annotations

import re

HIDDEN = "REDACTED"

# Of query parameters: AWS (version 4 and 2), Google, Azure (SAS), CloudFront, and what people call such things.
_NAMES = (
    r"x-(?:amz|goog|ms|oss|cos)-(?:signature|credential|security-token)|ossaccesskeyid|awsaccesskeyid|googleaccessid"
    r"|signature|sig|policy|(?:\w+[-_])?(?:token|secret|password|passwd|pwd)|auth"
    r"|(?:api|access|account|secret|subscription)[-_]?key"
)
# A parameter ends at the next one, at the end of the url, or where a text quotes it.
_PARAMETER = re.compile(rf"([?&;#](?:{_NAMES})=)[^\s&;#'\"<>]+", re.IGNORECASE)
# C0 and C1 controls, ends of lines, and what turns the direction of a text around.
_COMMANDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Passwords may hold slashes, AWS's often do; a port, an IPv6 address, an ARN and github's org:repo@ref are none. Each
# ends before the next "://": to look beyond, from every one anew, takes minutes on a text of nothing else.
_USERINFO = re.compile(r"(?<!github)(://)(?!arn:)[^\s/@:\[{'\"]*:(?!\d{0,5}(?:[/?#\s'\"]|$))(?:(?!://)[^\s@'\"])*@")


def redact(text: str) -> str:
    """Return a url, or a text with urls in it, without passwords, signatures and tokens."""
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{HIDDEN}", text)
    return _USERINFO.sub(rf"\1{HIDDEN}@", text) if "@" in text else text


def printable(text: str) -> str:
    """Return a text of others, such as a job's name or a server's reason, on one line that a terminal only shows."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)
