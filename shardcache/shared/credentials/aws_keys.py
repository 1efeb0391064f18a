"""AWS's keys in the environment, which each session hands over to its user's private daemon.

Temporary keys expire; a program that renews them changes the values of the variables. The client
imports this module, so it uses the standard library alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shardcache.shared.credentials.sendable import is_sendable

_ACCESS_KEY = "AWS_ACCESS_KEY_ID"
_SECRET = "AWS_SECRET_ACCESS_KEY"
_TOKEN = "AWS_SESSION_TOKEN"


@dataclass(frozen=True, slots=True, repr=False)
class AwsKeys:
    """Keys of a user, or temporary keys of a role. The `repr` shows no secret.

    Attributes:
        names: environment variables whose values depend on the keys.
        label: text that stands for these values when a daemon's name is hashed.
        access_key: id of the keys.
        secret: the secret with which requests are signed.
        token: session token of temporary keys; empty for a user's keys.
    """

    names: ClassVar[tuple[str, ...]] = (
        _ACCESS_KEY,
        _SECRET,
        _TOKEN,
        "AWS_SECURITY_TOKEN",  # the token's older name
        "AWS_CREDENTIAL_EXPIRATION",
        "AWS_SESSION_EXPIRATION",
    )
    label: ClassVar[str] = "keys of AWS"

    access_key: str
    secret: str
    token: str

    def __repr__(self) -> str:
        return "<keys of AWS>"

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Self | None:
        """Return the keys in an environment, or in a message with the same names.

        Return None if there are no keys, or if no request can carry them.
        """
        access_key = variables.get(_ACCESS_KEY) or ""
        secret = variables.get(_SECRET) or ""
        token = variables.get(_TOKEN) or ""
        if not all(isinstance(value, str) for value in (access_key, secret, token)):
            return None
        if not access_key or not secret:
            return None
        if not all(map(is_sendable, (access_key, secret, token))):
            return None
        return cls(access_key, secret, token)

    @property
    def is_temporary(self) -> bool:
        """True if the keys expire."""
        return bool(self.token)

    @property
    def variables(self) -> dict[str, str]:
        """The values of the keys, by environment variable."""
        variables = {_ACCESS_KEY: self.access_key, _SECRET: self.secret}
        if self.token:
            variables[_TOKEN] = self.token
        return variables
