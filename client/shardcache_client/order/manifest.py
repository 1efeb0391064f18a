"""The ordered list of a dataset's shards, comparable between processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat, zip_longest
from typing import Any, Self, overload

from shardcache.errors import ConfigError, ProtocolError
from shardcache.protocol import ShardRef
from shardcache_client.order.selection import Choices, narrowed


@dataclass(frozen=True)
class Manifest(Sequence[ShardRef]):
    """The shards in the order of the dataset's urls; immutable.

    Attributes:
        shards: the shards, with version, size and number of samples where known.
        counts_listed: True if all counts come from index files, where every node finds the same ones; other counts are
            known only to nodes that have fetched the shards.
        choices: the samples of each shard that belong to the dataset; None for all samples of all shards.
    """

    shards: tuple[ShardRef, ...]
    counts_listed: bool = field(default=False, compare=False)
    choices: Choices | None = None

    @classmethod
    def of(cls, shards: Iterable[ShardRef]) -> Manifest:
        """Build from an iterable of shards."""
        return cls(tuple(shards))

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Manifest:
        """Build from the daemon's answer to `resolve`. Raises ProtocolError."""
        rows, tokens = answer["shards"], answer.get("tokens")
        shards = tuple(map(ShardRef.from_json, rows))
        if tokens is not None:
            if len(tokens) != len(shards) or not all(each is None or _is_count(each) for each in tokens):
                raise ProtocolError("the daemon's numbers of tokens do not fit its shards")
            shards = tuple(replace(shard, tokens=each) for shard, each in zip(shards, tokens, strict=True))
        return cls(shards, counts_listed=answer.get("remembered", 1) == 0)

    def of_blocks(self, count: Callable[[int, int], int]) -> Manifest:
        """Return the same shards with another number of samples each: `count(tokens, samples)`.

        Raises ConfigError if an index file does not give the tokens of each shard.
        """
        blocks = []
        for shard in self.shards:
            if shard.tokens is None or shard.samples is None:
                raise ConfigError(
                    f"the tokens of {sum(each.tokens is None for each in self.shards)} of {len(self)} shards were "
                    "never counted",
                    url=shard.url,
                    remedy="count them once with `shardcache index URL... --tokens npy -o index.json` (or --tokens "
                    "tok:uint16 for plain arrays), and use index.json as the url",
                )
            blocks.append(replace(shard, samples=count(shard.tokens, shard.samples), tokens=None))
        return Manifest(tuple(blocks), counts_listed=True)

    @classmethod
    def joined(cls, manifests: Sequence[Manifest]) -> Self:
        """Build from the shards of several manifests, one after another."""
        choices = None
        if any(manifest.choices is not None for manifest in manifests):
            choices = tuple(chain.from_iterable(each.choices or repeat(None, len(each)) for each in manifests))
        listed = all(manifest.counts_listed for manifest in manifests)
        return cls(tuple(chain.from_iterable(manifests)), listed, choices)

    def __repr__(self) -> str:
        samples = "unknown" if self.samples is None else self.samples
        return f"Manifest(shards={len(self)}, samples={samples}, fingerprint={self.fingerprint!r})"

    def __len__(self) -> int:
        return len(self.shards)

    @overload
    def __getitem__(self, index: int) -> ShardRef: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ShardRef, ...]: ...
    def __getitem__(self, index: int | slice) -> ShardRef | tuple[ShardRef, ...]:
        return self.shards[index]

    def __iter__(self) -> Iterator[ShardRef]:
        return iter(self.shards)

    @cached_property
    def counts(self) -> list[int] | None:
        """Number of samples of each shard that belong to the dataset; None unless all are known."""
        counts = [shard.samples for shard in self.shards if shard.samples is not None]
        if len(counts) < len(self.shards):
            return None
        chosen = zip(counts, self.choices or repeat(None), strict=False)
        return [count if choice is None else choice.count for count, choice in chosen]

    def chosen(self, shard: int) -> Sequence[int] | None:
        """Return the numbers in the tar of a shard's samples that belong to the dataset, ascending; None for all."""
        choice = None if self.choices is None else self.choices[shard]
        return None if choice is None else choice.numbers()

    def select(self, choices: Choices) -> Self:
        """Return the manifest of the samples chosen among those of this one."""
        return replace(self, choices=choices if self.choices is None else narrowed(self.choices, choices))

    @cached_property
    def selection(self) -> str:
        """32 hexadecimal digits that identify the choices among the samples; empty without any."""
        if self.choices is None:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for choice in self.choices:
            digest.update(repr(choice).encode())
        return digest.hexdigest()

    @property
    def uncounted(self) -> int:
        """Number of shards whose samples are not counted."""
        return sum(shard.samples is None for shard in self.shards)

    @property
    def samples(self) -> int | None:
        """Number of samples of all shards; None unless all are known."""
        return None if self.counts is None else sum(self.counts)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits (BLAKE2b, RFC 7693) that two manifests share if and only if their shards are equal."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(json.dumps(shard.to_json()).encode())
        return digest.hexdigest()

    def difference(self, other: Manifest) -> str | None:
        """Describe the first shard in which the other manifest differs from this one; None if they are equal."""
        for number, (mine, others) in enumerate(zip_longest(self.shards, other.shards)):
            if mine != others:
                return f"shard {number} is {_told(mine)} here and {_told(others)} there"
        return None

    def to_json(self) -> list[list[Any]]:
        """Return a row per shard, as `ShardRef.to_json` makes it."""
        return [shard.to_json() for shard in self.shards]

    @classmethod
    def from_json(cls, rows: Iterable[list[Any]]) -> Manifest:
        """Build from the rows of `to_json`."""
        return cls.of(map(ShardRef.from_json, rows))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _told(shard: ShardRef | None) -> str:
    if shard is None:
        return "missing"
    facts = {"version": shard.version, "bytes": shard.size_bytes, "samples": shard.samples}
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{shard.url} ({known or 'nothing else known'})"
