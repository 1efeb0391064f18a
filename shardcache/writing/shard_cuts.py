"""Division of a dataset into shards: the samples of each shard, and the shards' names.

`shardcache write` plans its shards with `cut`: a cut is a number of consecutive samples that become
one shard. Both `shardcache write` and `ShardWriter` name their shards by `ShardNames`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.urls.url_names import is_tar
from shardcache.writing.sample_tar import END, Position

SHARD_NAMES = "shard-%06d.tar"

_NUMBER = re.compile(r"%0?\d*d")


@dataclass(slots=True)
class Cut:
    """The samples of one shard.

    Attributes:
        first: position of the first sample in the input.
        last: position of the last sample in the input.
        samples: number of samples.
        size_bytes: size of the tar; exact if the input gives exact sizes.
    """

    first: Position
    last: Position
    samples: int
    size_bytes: int


def cut(samples: Iterable[tuple[int, Position]], shard_size_bytes: int) -> Iterator[Cut]:
    """Cut samples into shards of at most `shard_size_bytes`.

    Each shard is filled before the next begins. A sample that is larger is a shard by itself.

    Args:
        samples: size in bytes and position of each sample, as from `Source.sized_positions`.
        shard_size_bytes: maximum size of a shard.
    """
    current: Cut | None = None
    for size_bytes, position in samples:
        if current is not None and current.size_bytes + size_bytes > shard_size_bytes:
            yield current
            current = None
        if current is None:
            current = Cut(first=position, last=position, samples=0, size_bytes=len(END))
        current.last = position
        current.samples += 1
        current.size_bytes += size_bytes
    if current is not None:
        yield current


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of shards by number, from a pattern such as `train-%06d.tar`.

    Raises ConfigError for a pattern without exactly one number, or without the suffix `.tar`.
    """

    pattern: str = SHARD_NAMES

    def __post_init__(self) -> None:
        without_number = _NUMBER.sub("", self.pattern, count=1)
        has_one_number = without_number != self.pattern and "%" not in without_number
        is_in_folder = "/" in without_number
        is_hidden = without_number.startswith(".")
        has_suffix = without_number.endswith(".tar")
        if is_in_folder or is_hidden or not (has_one_number and has_suffix):
            raise ConfigError(
                f"not a pattern for names of shards: {self.pattern!r}",
                remedy="write one number with %, and the suffix .tar: train-%06d.tar",
            )

    def name(self, number: int) -> str:
        """Return the name of shard `number`, counted from 0."""
        return self.pattern % number

    def shards_not_matching(self, names: Iterable[str]) -> list[str]:
        """Return the names of shards that do not follow the pattern, sorted."""
        return sorted(name for name in names if is_tar(name) and not self._matches(name))

    def _matches(self, name: str) -> bool:
        """Return True for a name that the pattern gives to some number."""
        head, tail = _NUMBER.split(self.pattern)
        digits = name.removeprefix(head).removesuffix(tail)
        # The number is formatted again, since head, tail or leading zeros may be missing.
        return digits.isdecimal() and self.name(int(digits)) == name
