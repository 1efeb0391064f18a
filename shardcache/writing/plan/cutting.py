"""Cutting of a sequence of samples into shards, and their names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardcache.access.urls import SHARD_SUFFIXES
from shardcache.errors import ConfigError
from shardcache.writing.plan.tar import END

Position = TypeVar("Position")

SHARD_NAMES = "shard-%06d.tar"
_NUMBER = re.compile(r"%0?\d*d")


@dataclass(frozen=True, slots=True)
class Cut(Generic[Position]):
    """The samples of one shard: where the first and the last lie in the input, their number, and their size in the tar.

    The size is exact if the input gives exact sizes.
    """

    first: Position
    last: Position
    samples: int
    size_bytes: int


def cut(samples: Iterable[tuple[int, Position]], shard_size_bytes: int) -> Iterator[Cut[Position]]:
    """Yield shards of at most `shard_size_bytes`, each as full as it may be; a larger sample is a shard by itself.

    Args:
        samples: size in the tar, in bytes, and position of each sample.
    """
    count, total, most = 0, 0, shard_size_bytes - len(END)
    first = last = None
    for size_bytes, position in samples:
        if count and total + size_bytes > most:
            assert first is not None and last is not None
            yield Cut(first, last, count, total + len(END))
            count = total = 0
        if not count:
            first = position
        last = position
        count += 1
        total += size_bytes
    if count:
        assert first is not None and last is not None
        yield Cut(first, last, count, total + len(END))


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of shards by number, from a pattern such as `train-%06d.tar`. Raises ConfigError for any other pattern."""

    pattern: str = SHARD_NAMES

    def __post_init__(self) -> None:
        rest = _NUMBER.sub("", self.pattern, count=1)
        if len(rest) == len(self.pattern) or "%" in rest or "/" in rest or rest.startswith(".") or rest[-4:] != ".tar":
            raise ConfigError(
                f"not a pattern for names of shards: {self.pattern!r}",
                remedy="write one number with %, and the suffix .tar: train-%06d.tar",
            )

    def name(self, number: int) -> str:
        """Return the name of shard `number`, counted from 0."""
        return self.pattern % number

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Return the names of shards, or of what readers take for one, that the pattern cannot have produced."""
        return sorted(name for name in names if name.endswith(SHARD_SUFFIXES) and not self._is_own(name))

    def _is_own(self, name: str) -> bool:
        head, tail = _NUMBER.split(self.pattern)
        digits = name.removeprefix(head).removesuffix(tail)
        return digits.isdecimal() and self.name(int(digits)) == name
