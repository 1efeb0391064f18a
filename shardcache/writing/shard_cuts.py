"""Division of a dataset into shards: the samples of each shard, and the shards' names.

`conversion` plans its shards with `cut`: a cut is a run of consecutive samples that become one
shard. `ShardNames` gives the names to `conversion` and to `ShardWriter`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError
from shardcache.shared.urls.url_names import is_tar
from shardcache.writing.sample_tar import END

SHARD_NAMES = "shard-%06d.tar"

_NUMBER = re.compile(r"%0?\d*d")


@dataclass(slots=True)
class Cut:
    """The samples of one shard.

    Attributes:
        first: position of the first sample in the input.
        last: position of the last sample.
        samples: number of samples.
        size_bytes: size of the tar; exact if the input gives exact sizes.
    """

    first: Any
    last: Any
    samples: int
    size_bytes: int


def cut(samples: Iterable[tuple[int, Any]], shard_size_bytes: int) -> Iterator[Cut]:
    """Cut samples into shards of at most `shard_size_bytes`.

    Each shard is filled before the next begins. A sample that is larger is a shard by itself.

    Args:
        samples: size in bytes and position of each sample.
        shard_size_bytes: maximum size of a shard.
    """
    shard: Cut | None = None
    for size_bytes, position in samples:
        if shard is None or shard.size_bytes + size_bytes > shard_size_bytes:
            if shard is not None:
                yield shard
            shard = Cut(first=position, last=position, samples=0, size_bytes=len(END))
        shard.last = position
        shard.samples += 1
        shard.size_bytes += size_bytes
    if shard is not None:
        yield shard


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of shards by number, from a pattern such as `train-%06d.tar`.

    Raises ConfigError for a pattern without exactly one number, or without the suffix `.tar`.
    """

    pattern: str = SHARD_NAMES

    def __post_init__(self) -> None:
        text = _NUMBER.sub("", self.pattern, count=1)
        has_one_number = text != self.pattern and "%" not in text
        is_visible_file = "/" not in text and not text.startswith(".")
        if not (has_one_number and is_visible_file and text.endswith(".tar")):
            raise ConfigError(
                f"not a pattern for names of shards: {self.pattern!r}",
                remedy="write one number with %, and the suffix .tar: train-%06d.tar",
            )

    def name(self, number: int) -> str:
        """Return the name of shard `number`, counted from 0."""
        return self.pattern % number

    def shards_not_matching(self, names: Iterable[str]) -> list[str]:
        """Return, sorted, those names that are of shards but do not follow the pattern."""
        return sorted(name for name in names if is_tar(name) and not self._matches(name))

    def _matches(self, name: str) -> bool:
        """Return True for a name that the pattern gives to some number."""
        head, tail = _NUMBER.split(self.pattern)
        digits = name.removeprefix(head).removesuffix(tail)
        return digits.isdecimal() and self.name(int(digits)) == name
