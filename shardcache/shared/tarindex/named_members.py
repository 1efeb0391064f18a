"""Members of samples that a user names on the command line or in the client's arguments.

`MetadataMember` names the member of each sample that holds its metadata, and `TokenMember` the
member that holds its tokens.
"""

from dataclasses import dataclass
from typing import Self

from shardcache.shared.exceptions import ConfigError

DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
"""The types that tokens may have, with their sizes in bytes; arrays are little-endian."""


@dataclass(frozen=True, slots=True)
class MetadataMember:
    """The member of each sample that holds its metadata.

    Attributes:
        extension: extension of the member.
        fields: fields of the member's JSON object that are metadata; empty for all fields.
    """

    extension: str
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for an extension that no member can have."""
        _check_extension(self.extension, "json")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION`, or `EXTENSION:FIELD,FIELD`. Raises ConfigError."""
        extension, _, fields = text.partition(":")
        return cls(extension, tuple(filter(None, fields.split(","))))


@dataclass(frozen=True, slots=True)
class TokenMember:
    """The member of each sample that holds its tokens.

    Attributes:
        extension: extension of the member.
        dtype: type of the tokens in a plain array, a key of `DTYPES`; None for `.npy` files, which
            state their type.
    """

    extension: str = "npy"
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a type or an extension that tokens cannot have."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"tokens cannot be of type {self.dtype!r}",
                remedy=f"choose one of {', '.join(DTYPES)}",
            )
        _check_extension(self.extension, "npy")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION` for `.npy` files, or `EXTENSION:DTYPE`. Raises ConfigError."""
        extension, _, dtype = text.partition(":")
        return cls(extension, dtype or None)

    def __str__(self) -> str:
        return self.extension if self.dtype is None else f"{self.extension}:{self.dtype}"


def _check_extension(extension: str, example: str) -> None:
    """Raise ConfigError unless members can have this extension; its remedy shows `example`."""
    if not extension or extension.startswith("."):
        raise ConfigError(
            f"{extension!r} is not a member extension",
            remedy=f'write it as "{example}", no dot',
        )
