"""The shards of a dataset, the choice of samples among them, and one reader's plan to read them. Pure."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat, zip_longest
from typing import Any, Literal, Protocol, Self, TypeAlias

from shardcache.errors import ConfigError
from shardcache.protocol import ShardRef, Wanted
from shardcache.shards import Shards, digest
from shardcache.url_names import INDEX_SUFFIX
from shardcache_client.order.lanes import Proportions
from shardcache_client.order.rounds import permutation

By = Literal["samples", "shards"]


class Choice(Protocol):
    """Some samples of one shard. Immutable; its `repr` tells it from any other choice."""

    @property
    def count(self) -> int:
        """Number of samples chosen."""

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the samples in the tar, ascending."""


Choices: TypeAlias = tuple[Choice | None, ...]
"""A choice for each shard of a manifest, None for all of its samples."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Samples with a bit each: bit n, from the lowest of the first byte on, is 1 if sample n is chosen."""

    count: int
    bits: bytes

    @classmethod
    def of(cls, marks: Sequence[object]) -> "Marked | None":
        """Build from a truth value for each sample; None if all are true."""
        count = sum(map(bool, marks))
        if count == len(marks):
            return None
        digits = "".join("1" if mark else "0" for mark in reversed(marks))
        return cls(count, int(digits, 2).to_bytes(-(-len(marks) // 8), "little")) if count else NO_SAMPLES

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        digits = reversed(format(int.from_bytes(self.bits, "little"), "b"))
        return [number for number, digit in enumerate(digits) if digit == "1"]


NO_SAMPLES = Marked(0, b"")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn at random: those from place `start` on in the permutation of all that a key determines."""

    start: int
    count: int
    samples: int
    key: str

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        return sorted(permutation(self.samples, self.key)[self.start : self.start + self.count])


@dataclass(frozen=True, slots=True)
class Within:
    """A choice among the samples of another choice, which it counts from 0."""

    outer: Choice
    inner: Choice

    @property
    def count(self) -> int:
        """Number of samples chosen."""
        return self.inner.count

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the chosen samples; see `Choice`."""
        outer = self.outer.numbers()
        return [outer[number] for number in self.inner.numbers()]


def _narrowed(outer: Choice | None, inner: Choice | None) -> Choice | None:
    if outer is None or inner is None:
        return inner or outer
    return Within(outer, inner) if inner.count else NO_SAMPLES


def subset(counts: Sequence[int], numbers: Iterable[int]) -> Choices:
    """Return the choice of samples by number; negative ones count from the end. Raises IndexError if out of range."""
    ends = list(accumulate(counts))
    total = ends[-1] if ends else 0
    marks: dict[int, bytearray] = {}
    for number in numbers:
        if not -total <= number < total:
            raise IndexError(f"sample {number} of a dataset with {total} samples")
        shard = bisect_right(ends, number % total)
        if shard not in marks:
            marks[shard] = bytearray(counts[shard])
        marks[shard][number % total - ends[shard]] = 1  # counted from the shard's end
    return tuple(Marked.of(marks[shard]) if shard in marks else NO_SAMPLES for shard in range(len(counts)))


def split(counts: Sequence[int], fractions: Sequence[float], seed: int, by: By) -> list[Choices]:
    """Return the choices of the parts of a split: together all samples, each in one part.

    By samples, the parts are as large as the fractions say, to the sample. Each gets its fraction of every shard, with
    an error of at most one sample, or below four if there are more than two parts; which ones is random. By shards,
    each shard goes to one part, in random order, so the sizes differ from the fractions by up to a shard.

    Raises ConfigError for fractions that do not add up to 1, and for a part that would be empty.
    """
    if not all(0 < fraction <= 1 for fraction in fractions) or not math.isclose(sum(fractions), 1, rel_tol=1e-6):
        raise ConfigError(f"the fractions of the split are {fractions}", remedy="give some above 0 whose sum is 1")
    total = sum(counts)
    ends = [*(round(total * end) for end in accumulate(fractions[:-1])), total]
    parts = _by_samples(counts, ends, seed) if by == "samples" else _by_shards(counts, ends, seed)
    for part, (choices, fraction) in enumerate(zip(parts, fractions, strict=True)):
        if not any(count if choice is None else choice.count for choice, count in zip(choices, counts, strict=True)):
            raise ConfigError(
                f"part {part} of the split, {fraction:g} of {total} samples in {len(counts)} shards, is empty",
                remedy='give it a larger fraction; or split by="samples"',
            )
    return parts


def _by_samples(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    turns = Proportions(tuple(stop - start for start, stop in pairwise((0, *ends))))
    parts: list[list[Choice | None]] = [[] for _ in ends]
    for shard, (first, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        start, count = 0, stop - first
        for part, before, after in zip(parts, turns.before(first), turns.before(stop), strict=True):
            size = after - before
            drawn = Drawn(start, size, count, f"split/{seed}/{shard}") if size else NO_SAMPLES
            part.append(None if size == count else drawn)
            start += size
    return [tuple(part) for part in parts]


def _by_shards(counts: Sequence[int], ends: Sequence[int], seed: int) -> list[Choices]:
    part_of = [0] * len(counts)
    before = 0
    for shard in permutation(len(counts), f"split/{seed}"):
        part_of[shard] = min(bisect_right(ends, before + counts[shard] // 2), len(ends) - 1)
        before += counts[shard]
    return [tuple(None if each == part else NO_SAMPLES for each in part_of) for part in range(len(ends))]


@dataclass(frozen=True, slots=True)
class Column:
    """Shards that are read beside those of another manifest, as their samples have the same keys."""

    prefix: str  # of its members' extensions
    manifest: "Manifest"  # of its own shards
    pairs: tuple[tuple[int, ...], ...] | None = None  # numbers of these beside each shard; None for the nth alone
    first: int = 0  # number of the first shard that these are beside; not 0 if several datasets are mixed
    repeated: tuple[frozenset[bytes], ...] = ()  # keys of each shard that come again in another; empty if unknown

    def has(self, shard: int) -> bool:
        """Return True if these are read beside a shard of the other manifest."""
        shards = self.manifest if self.pairs is None else self.pairs
        return 0 <= shard - self.first < len(shards)

    def beside(self, shard: int) -> tuple[int, ...]:
        """Return the numbers of these beside a shard of the other manifest."""
        nth = shard - self.first
        return (nth,) if self.pairs is None else self.pairs[nth]

    def repeated_in(self, shard: int) -> frozenset[bytes]:
        """Return the keys of a shard of the other manifest that come again in another of its shards."""
        nth = shard - self.first
        return self.repeated[nth] if 0 <= nth < len(self.repeated) else frozenset()


@dataclass(frozen=True)
class Manifest(Sequence[ShardRef]):
    """The shards in the order of the dataset's urls; immutable, comparable between processes."""

    shards: Shards  # with version, size and number of samples where known
    # True if all counts come from index files, where every node finds the same ones; others are known only to nodes
    # that have fetched the shards.
    counts_listed: bool = field(default=False, compare=False)
    # True if index files may name the versions that are wanted; in a listing, they are merely those that were there.
    versions_named: bool = field(default=True, compare=False)
    choices: Choices | None = None  # the samples of each shard that belong to the dataset; None for all
    lists: tuple[str, ...] = field(default=(), compare=False)  # fingerprints of the lists as resolved, if others
    columns: tuple[Column, ...] = ()  # shards that are read beside these

    @classmethod
    def of(cls, shards: Iterable[ShardRef]) -> "Manifest":
        """Build from an iterable of shards."""
        return cls(Shards.of(shards))

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], urls: Sequence[str] = ()) -> "Manifest":
        """Build from the daemon's answer to `resolve`, which asked for the urls. Raises ProtocolError."""
        shards = Shards.unpack(answer["packed"])
        assert shards.fingerprint  # once here, rather than in each of the workers that are forked from this process
        named = not urls or any(INDEX_SUFFIX in url for url in urls)
        return cls(shards, counts_listed=answer.get("remembered", 1) == 0, versions_named=named)

    def of_some(self, numbers: Iterable[int]) -> "Manifest":
        """Return the manifest of some of the shards alone, by their numbers."""
        shards = Shards.of(map(self.__getitem__, numbers))
        return Manifest(shards, counts_listed=self.counts_listed, versions_named=self.versions_named)

    @property
    def is_replaceable(self) -> bool:
        """True if a shard may be read in another version than listed, if it has the same number of samples."""
        return self.choices is None and not self.versions_named

    def of_blocks(self, count: Callable[[int, int], int]) -> "Manifest":
        """Return the same shards with another number of samples each: `count(tokens, samples)`. Raises ConfigError."""
        tokens, samples = self.shards.tokens, self.shards.samples
        if (uncounted := tokens.count(-1) or samples.count(-1)) > 0:
            raise ConfigError(
                f"the tokens of {uncounted} of {len(self)} shards were never counted",
                url=self[(tokens if -1 in tokens else samples).index(-1)].url,
                remedy="count them once with `shardcache index URL... --tokens npy -o index.json` (or --tokens "
                "tok:uint16 for plain arrays), and use index.json as the url",
            )
        return replace(self, shards=self.shards.with_samples(map(count, tokens, samples)), lists=(self.fingerprint,))

    @classmethod
    def joined(cls, manifests: "Sequence[Manifest]") -> Self:
        """Build from the shards of several manifests, one after another."""
        choices = None
        if any(manifest.choices is not None for manifest in manifests):
            choices = tuple(chain.from_iterable(each.choices or repeat(None, len(each)) for each in manifests))
        listed = all(manifest.counts_listed for manifest in manifests)
        named = any(manifest.versions_named for manifest in manifests)
        lists = tuple(chain.from_iterable(each.lists or (each.fingerprint,) for each in manifests))
        firsts = zip(accumulate(map(len, manifests), initial=0), manifests, strict=False)
        columns = tuple(replace(column, first=first) for first, each in firsts for column in each.columns)
        return cls(Shards.joined([each.shards for each in manifests]), listed, named, choices, lists, columns)

    @cached_property
    def planned(self) -> "Manifest":
        """All shards that are read: these, then those of each column."""
        if not self.columns:
            return self
        return Manifest.joined([replace(self, columns=()), *(each.manifest for each in self.columns)])

    def beside(self, shard: int) -> dict[str, list[int]]:
        """Return the numbers in `planned` of the shards that are read beside a shard, by their columns' prefixes."""
        firsts, found = accumulate((len(each.manifest) for each in self.columns), initial=len(self)), {}
        for first, column in zip(firsts, self.columns, strict=False):
            if column.has(shard):
                found[column.prefix] = [first + number for number in column.beside(shard)]
        return found

    def repeated_in(self, shard: int) -> frozenset[bytes]:
        """Return the keys of a shard that come again in another, if tables say so: they have no partner."""
        return frozenset().union(*(column.repeated_in(shard) for column in self.columns))

    def tabled(self, shard: int) -> frozenset[str]:
        """Return the prefixes of the columns whose shards beside a shard were found by tables."""
        tabled = (each for each in self.columns if each.pairs is not None)
        return frozenset(each.prefix for each in tabled if each.has(shard))

    def together(self, shard: int) -> list[int]:
        """Return the numbers in `planned` of a shard and those beside it, in the order in which they are read."""
        return [shard, *chain.from_iterable(self.beside(shard).values())]

    def url_of(self, url: str, extension: str) -> str:
        """Return the url of the shards, this one or those beside it, that have the members with an extension."""
        beside = self.beside([*self.shards.urls].index(url)).items()
        found = [shards for prefix, shards in beside if extension.startswith(prefix)]
        return " or ".join(self.planned[number].url for number in found[-1]) if found else url

    def __repr__(self) -> str:
        samples = "unknown" if self.samples is None else self.samples
        return f"Manifest(shards={len(self)}, samples={samples}, fingerprint={self.fingerprint!r})"

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> ShardRef:  # type: ignore[override]  # no slices
        return self.shards[index]

    @cached_property
    def counts(self) -> list[int] | None:
        """Number of samples of each shard that belong to the dataset; None unless all are known."""
        if self.uncounted:
            return None
        chosen = zip(self.shards.samples, self.choices or repeat(None), strict=False)
        return [count if choice is None else choice.count for count, choice in chosen]

    @property
    def samples(self) -> int | None:
        """Number of samples of all shards; None unless all are known."""
        return None if self.counts is None else sum(self.counts)

    @property
    def uncounted(self) -> int:
        """Number of shards whose samples are not counted."""
        return self.shards.samples.count(-1)

    def uncounted_error(self, what: str) -> ConfigError:
        """Return the error for a dataset that cannot do something without the numbers of samples."""
        return ConfigError(
            f"{what}: {self.uncounted} of {len(self)} shards were never counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use index.json as the url",
        )

    def chosen(self, shard: int) -> Sequence[int] | None:
        """Return the numbers in the tar of a shard's samples that belong to the dataset, ascending; None for all."""
        choice = None if self.choices is None else self.choices[shard]
        return None if choice is None else choice.numbers()

    def select(self, choices: Choices) -> Self:
        """Return the manifest of the samples chosen among those of this one."""
        return replace(self, choices=tuple(map(_narrowed, self.choices or repeat(None), choices)))

    @cached_property
    def selection(self) -> str:
        """32 hexadecimal digits that identify the choices among the samples; empty without any."""
        return "" if self.choices is None else digest(repr(choice).encode() for choice in self.choices)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that two manifests share if and only if their shards are equal."""
        return self.shards.fingerprint

    def difference(self, other: "Manifest") -> str | None:
        """Describe the first shard in which the other manifest differs from this one; None if they are equal."""
        for number, (mine, others) in enumerate(zip_longest(self.shards, other.shards)):
            if mine != others:
                return f"shard {number} is {_described(mine)} here and {_described(others)} there"
        return None


def _described(shard: ShardRef | None) -> str:
    if shard is None:
        return "missing"
    facts = {"version": shard.version, "bytes": shard.size_bytes, "samples": shard.samples}
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{shard.url} ({known or 'nothing else known'})"


# Number of positions in a plan's first message, and in each that follows.
_FIRST_PIECE = 1_000
_NEXT_PIECE = 4_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards that one reader will read, as declared to the daemon."""

    epoch: int
    manifest: Manifest  # of the dataset
    order: "array[int]"  # numbers of planned shards in the order in which this epoch reads them
    after: Callable[[], Iterable[int]] = tuple  # returns those of the next epoch
    wanted: Wanted = "samples"

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        epoch: int,
        now: Iterable[int],
        after: Callable[[], Iterable[int]] = tuple,
        wanted: Wanted = "samples",
    ) -> "Plan":
        """Build the plan to read shards, and those beside them: `now` in this epoch, those of `after` in the next."""

        def planned(some: Iterable[int]) -> Iterable[int]:
            return chain.from_iterable(map(manifest.together, some)) if manifest.columns else some

        return cls(epoch, manifest, array("I", planned(now)), lambda: planned(after()), wanted)

    @property
    def reads(self) -> int:
        """Number of positions of this epoch."""
        return len(self.order)

    @property
    def shards(self) -> Shards:
        """All shards that are read of the dataset."""
        return self.manifest.planned.shards

    def shard(self, position: int) -> ShardRef:
        """Return the shard at a position."""
        return self.shards[self.order[position]]

    def messages(self, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that declare the plan from position `start` on, as (type, fields).

        The first is a `plan`, small for a quick start, the others each an `extend` of it. They are built lazily, and so
        is the order of the next epoch: that of many shards takes a while.
        """
        planned = self.manifest.planned
        lists = planned.lists or (planned.fingerprint,)
        first: dict[str, Any] = {"shards": lists, "epoch": self.epoch, "reads": self.reads - start}
        first |= {} if self.wanted == "samples" else {"wanted": self.wanted}
        now, after = self.order[start:], self.after
        if len(now) < _FIRST_PIECE:
            now, after = array("I", chain(now, after())), tuple
        yield "plan", first | {"order": now[:_FIRST_PIECE].tolist()}
        for some in (lambda: now[_FIRST_PIECE:], after):
            order = array("I", some())
            for begin in range(0, len(order), _NEXT_PIECE):
                yield "extend", {"order": order[begin : begin + _NEXT_PIECE].tolist()}
