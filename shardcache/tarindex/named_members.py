"""Members of samples that a user names: those with the metadata, and those with the tokens."""

from dataclasses import dataclass
from typing import Self

from shardcache.errors import ConfigError

DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
"""Sizes in bytes of the types that tokens may have; arrays are little-endian."""


@dataclass(frozen=True, slots=True)
class MetadataMember:
    """The member of each sample that holds its metadata.

    Attributes:
        extension: of the member.
        fields: of its JSON object that are metadata; empty for all.
    """

    extension: str
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for an extension that no member has."""
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
        extension: of the member.
        dtype: a name of `DTYPES`, for plain arrays; None for `.npy` files, which state their own.
    """

    extension: str = "npy"
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a type that tokens cannot have."""
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
    """Raise ConfigError unless members can have this extension; the message has an example."""
    if not extension or extension.startswith("."):
        raise ConfigError(
            f"{extension!r} is not a member extension",
            remedy=f'write it as "{example}", no dot',
        )
