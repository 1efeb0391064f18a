"""AWS's temporary keys in the environment, which a private daemon gets from whoever has newer ones.

A program renews them by other values of the same variables. The standard library alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

_ACCESS_KEY = "AWS_ACCESS_KEY_ID"
_SECRET = "AWS_SECRET_ACCESS_KEY"
_TOKEN = "AWS_SESSION_TOKEN"


@dataclass(frozen=True, slots=True, repr=False)
class TemporaryKeys:
    """Keys that end by themselves; their `repr` shows none of them.

    Attributes:
        names: variables that have other values each time that the keys are renewed.
        kind: stands for their values in the name of a daemon.
        access_key: their id.
        secret: signs requests.
        token: proves that they are valid.
    """

    names: ClassVar[tuple[str, ...]] = (
        _ACCESS_KEY,
        _SECRET,
        _TOKEN,
        "AWS_SECURITY_TOKEN",  # the token's older name
        "AWS_CREDENTIAL_EXPIRATION",
        "AWS_SESSION_EXPIRATION",
    )
    kind: ClassVar[str] = "temporary keys"

    access_key: str
    secret: str
    token: str

    def __repr__(self) -> str:
        return "<temporary keys>"

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Self | None:
        """Return the keys in an environment, or in a message with its names; None without any."""
        values = [variables.get(name) for name in (_ACCESS_KEY, _SECRET, _TOKEN)]
        if not all(isinstance(value, str) and value for value in values):
            return None
        return cls(*map(str, values))

    @property
    def variables(self) -> dict[str, str]:
        """The keys by the names of their variables."""
        return {_ACCESS_KEY: self.access_key, _SECRET: self.secret, _TOKEN: self.token}
