"""Azure's secrets in the environment, which each session hands over to its user's private daemon.

The client imports this module, so it uses the standard library alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shardcache.shared.credentials.sendable import is_sendable

_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
# Fields of a connection string that are secret. All others say where the account is.
_SECRET_FIELDS = ("accountkey", "sharedaccesssignature")


@dataclass(frozen=True, slots=True, repr=False)
class AzureSecret:
    """A connection string, an account key, a shared access signature, or a client secret.

    An environment may have several of these; adlfs, the client of Azure, chooses among them. The
    `repr` shows no secret.

    Attributes:
        names: environment variables whose values depend on the secret.
        values: the variables that are set and their values, in the order of `names`.
    """

    names: ClassVar[tuple[str, ...]] = (
        _CONNECTION_STRING,
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_CLIENT_SECRET",
    )

    values: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return "<secret of Azure>"

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Self | None:
        """Return the secret in an environment, or in a message with the same names.

        Return None if there is no secret, or if no request can carry one of them.
        """
        values: list[tuple[str, str]] = []
        for name in cls.names:
            value = variables.get(name)
            if isinstance(value, str) and value:
                values.append((name, value))
        if not all(is_sendable(value) for _, value in values):
            return None
        if not values:
            return None
        return cls(tuple(values))

    @property
    def variables(self) -> dict[str, str]:
        """The values of the secret, by environment variable."""
        return dict(self.values)

    @property
    def label(self) -> str:
        """Text that stands for the values when a daemon's name is hashed.

        It has the names of the variables, and the account.
        """
        words = [name for name, _ in self.values]
        words += _account_fields(self.variables.get(_CONNECTION_STRING, ""))
        return f"secret of Azure: {';'.join(words)}"


def _account_fields(connection_string: str) -> list[str]:
    """Return the fields of a connection string that say where the account is."""
    fields = [field.strip() for field in connection_string.split(";")]
    public = [field for field in fields if _name_of(field) not in _SECRET_FIELDS]
    return sorted(filter(None, public))


def _name_of(field: str) -> str:
    """Return the name in `Name=value`, in lower case."""
    name, _, _ = field.partition("=")
    return name.strip().lower()
