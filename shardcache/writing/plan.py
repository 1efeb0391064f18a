"""Ends of shards, their names, and those that an interrupted run has completed. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardcache.access.urls import SHARD_SUFFIXES
from shardcache.errors import ConfigError
from shardcache.writing.sample import END

SHARD_NAMES = "shard-%06d.tar"
_NUMBER = re.compile(r"%0?\d*d")

JOURNAL = ".shardcache-write.json"
"""Name of the journal in the destination."""

FORMAT = 1
"""Number of the layout of written shards: another release's may differ, and must not be mixed with this one's."""


@dataclass(slots=True)
class Cut:
    """The samples of one shard: where the first and the last lie in the input, their number, and their size in the tar.

    The size is exact if the input gives exact sizes.
    """

    first: Any
    last: Any
    samples: int
    size_bytes: int


def cut(samples: Iterable[tuple[int, Any]], shard_size_bytes: int) -> Iterator[Cut]:
    """Yield shards of at most `shard_size_bytes`, each as full as it may be; a larger sample is a shard by itself.

    Args:
        samples: size in the tar, in bytes, and position of each sample.
    """
    shard: Cut | None = None
    for size_bytes, position in samples:
        if shard is None or shard.size_bytes + size_bytes > shard_size_bytes:
            if shard is not None:
                yield shard
            shard = Cut(position, position, 0, len(END))
        shard.last = position
        shard.samples += 1
        shard.size_bytes += size_bytes
    if shard is not None:
        yield shard


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of shards by number, from a pattern such as `train-%06d.tar`. Raises ConfigError for any other pattern."""

    pattern: str = SHARD_NAMES

    def __post_init__(self) -> None:
        fixed = _NUMBER.sub("", self.pattern, count=1)
        if fixed == self.pattern or "%" in fixed or "/" in fixed or fixed.startswith(".") or fixed[-4:] != ".tar":
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


class Stored(NamedTuple):
    """A complete shard in the destination: its size, its version there, and its numbers of samples and tokens."""

    size_bytes: int
    version: str
    samples: int
    tokens: int | None = None


@dataclass(slots=True)
class Journal:
    """The input and settings of a dataset, and its complete shards, by name: kept beside them."""

    settings: dict[str, Any]
    shards: dict[str, Stored] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the journal's text; `resume` reads it."""
        text = {"format": FORMAT, "settings": self.settings, "shards": self.shards}
        return json.dumps(text, ensure_ascii=True, indent=1).encode()


def resume(text: bytes, settings: Mapping[str, Any], url: str) -> Journal:
    """Return the journal of an interrupted run with the same settings.

    Raises ConfigError, naming the settings, if they or the input have changed: the new shards must not mix with the
    old.
    """
    remedy = "empty the destination, or choose another"
    try:
        found = json.loads(text)
        then, shards = found["settings"], {name: Stored(*row) for name, row in found["shards"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exn:
        raise ConfigError(f"{JOURNAL} is damaged ({exn})", url=url, remedy=remedy) from exn
    if found.get("format") != FORMAT:
        raise ConfigError("another release of shardcache began to write this dataset", url=url, remedy=remedy)
    now = dict(settings)
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if changed:
        what = "; ".join(f"{name}: {_shown(then.get(name))} then, {_shown(now.get(name))} now" for name in changed)
        raise ConfigError(
            f"the destination holds shards of other input or settings ({what})",
            url=url,
            remedy=f"to resume, restore these; otherwise {remedy}",
        )
    return Journal(now, shards)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
