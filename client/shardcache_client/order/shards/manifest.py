"""The shards of a dataset, the shards that are joined to them, and the chosen samples. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat, zip_longest
from typing import Any, Self

from shardcache.errors import ConfigError
from shardcache.shared.lists.shard_columns import Shards, Texts, digest
from shardcache.shared.protocol import ShardRef
from shardcache.shared.urls.signed_urls import without_signature
from shardcache.shared.urls.url_names import may_name_index
from shardcache_client.order.shards.choices import Choices, narrowed


@dataclass(frozen=True, slots=True)
class JoinedManifest:
    """Shards that are read beside those of another manifest, as their samples have the same keys.

    Attributes:
        prefix: of its members' extensions.
        manifest: of the joined shards.
        pairs: for each shard of the other manifest, the numbers of the joined shards that are read
            beside it; None for the nth beside the nth.
        first_shard: number of the first shard that has joined ones; not 0 if several datasets are
            mixed.
        repeated: for each shard of the other manifest, its keys that another of its shards has too;
            empty if unknown.
    """

    prefix: str
    manifest: "Manifest"
    pairs: tuple[tuple[int, ...], ...] | None = None
    first_shard: int = 0
    repeated: tuple[frozenset[bytes], ...] = ()

    def has(self, shard: int) -> bool:
        """Return True if joined shards are read beside a shard of the other manifest."""
        joined = self.manifest if self.pairs is None else self.pairs
        return 0 <= shard - self.first_shard < len(joined)

    def beside(self, shard: int) -> tuple[int, ...]:
        """Return the numbers of the joined shards beside a shard of the other manifest."""
        nth = shard - self.first_shard
        if self.pairs is None:
            return (nth,)
        return self.pairs[nth]

    def repeated_in(self, shard: int) -> frozenset[bytes]:
        """Return the keys of a shard of the other manifest that another of its shards has too."""
        nth = shard - self.first_shard
        if 0 <= nth < len(self.repeated):
            return self.repeated[nth]
        return frozenset()


@dataclass(frozen=True)
class Manifest(Sequence[ShardRef]):
    """The shards in the order of the dataset's urls; immutable, comparable between processes.

    Attributes:
        shards: with version, size and number of samples where known.
        counts_listed: True if all counts come from index files, where every node finds the same
            ones; others are known only to nodes that have fetched the shards.
        versions_named: True if index files may name the versions that are wanted; in a listing,
            they are merely those that were there.
        choices: the samples of each shard that belong to the dataset; None for all.
        lists: fingerprints of the lists that were resolved, if `shards` is made from several or has
            other numbers of samples.
        columns: shards that are joined to these.
    """

    shards: Shards
    counts_listed: bool = field(default=False, compare=False)
    versions_named: bool = field(default=True, compare=False)
    choices: Choices | None = None
    lists: tuple[str, ...] = field(default=(), compare=False)
    columns: tuple[JoinedManifest, ...] = ()

    @classmethod
    def of(cls, shards: Iterable[ShardRef]) -> "Manifest":
        """Build from an iterable of shards."""
        return cls(Shards.of(shards))

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], urls: Sequence[str] = ()) -> "Manifest":
        """Build from the daemon's answer to `resolve`. Raises ProtocolError.

        Args:
            answer: fields of the answer.
            urls: those that were asked for.
        """
        shards = Shards.unpack(answer["packed"])
        # Computed once here, rather than in each of the workers that are forked from this process.
        _ = shards.fingerprint
        counts_of_node = answer.get("remembered", 1)  # that only this daemon knows
        return cls(
            shards,
            counts_listed=counts_of_node == 0,
            versions_named=not urls or any(map(may_name_index, urls)),
        )

    @classmethod
    def joined(cls, manifests: "Sequence[Manifest]") -> Self:
        """Build from the shards of several manifests, one after another."""
        choices: Choices | None = None
        if any(each.choices is not None for each in manifests):
            of_each = (each.choices or repeat(None, len(each)) for each in manifests)
            choices = tuple(chain.from_iterable(of_each))

        lists: list[str] = []
        columns: list[JoinedManifest] = []
        first = 0
        for each in manifests:
            lists += each.lists or (each.fingerprint,)
            columns += [replace(column, first_shard=first) for column in each.columns]
            first += len(each)

        return cls(
            Shards.joined([each.shards for each in manifests]),
            counts_listed=all(each.counts_listed for each in manifests),
            versions_named=any(each.versions_named for each in manifests),
            choices=choices,
            lists=tuple(lists),
            columns=tuple(columns),
        )

    def __repr__(self) -> str:
        samples = "unknown" if self.samples is None else self.samples
        return f"Manifest(shards={len(self)}, samples={samples}, fingerprint={self.fingerprint!r})"

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> ShardRef:  # type: ignore[override]  # no slices
        return self.shards[index]

    def of_some(self, numbers: Iterable[int]) -> "Manifest":
        """Return the manifest of some of the shards alone, by their numbers."""
        shards = Shards.of(map(self.__getitem__, numbers))
        return Manifest(
            shards, counts_listed=self.counts_listed, versions_named=self.versions_named
        )

    @property
    def is_replaceable(self) -> bool:
        """True if a shard may be read in another version than listed.

        That version must have the same number of samples.
        """
        return self.choices is None and not self.versions_named

    def of_blocks(self, count: Callable[[int, int], int]) -> "Manifest":
        """Return the same shards with another number of samples each. Raises ConfigError.

        Args:
            count: returns it, given a shard's numbers of tokens and of samples.
        """
        tokens = self.shards.tokens
        samples = self.shards.samples
        uncounted = tokens if -1 in tokens else samples
        if -1 in uncounted:
            raise ConfigError(
                f"the tokens of {uncounted.count(-1)} of {len(self)} shards were never counted",
                url=self[uncounted.index(-1)].url,
                remedy="count them once with `shardcache index URL... --tokens npy -o index.json` "
                "(or --tokens tok:uint16 for plain arrays), and use index.json as the url",
            )
        shards = self.shards.with_samples(map(count, tokens, samples))
        return replace(self, shards=shards, lists=(self.fingerprint,))

    @cached_property
    def planned(self) -> "Manifest":
        """All shards that are read: these, then those of each column."""
        if not self.columns:
            return self
        alone = replace(self, columns=())
        return Manifest.joined([alone, *(column.manifest for column in self.columns)])

    def beside(self, shard: int) -> dict[str, list[int]]:
        """Return the numbers in `planned` of the shards read beside a shard, by column's prefix."""
        beside = {}
        first = len(self)
        for column in self.columns:
            if column.has(shard):
                beside[column.prefix] = [first + number for number in column.beside(shard)]
            first += len(column.manifest)
        return beside

    def repeated_in(self, shard: int) -> frozenset[bytes]:
        """Return the keys of a shard that come again in another, if tables say so.

        Such samples have no partner.
        """
        return frozenset().union(*(column.repeated_in(shard) for column in self.columns))

    def paired_by_tables(self, shard: int) -> frozenset[str]:
        """Return the prefixes of the columns whose shards beside a shard were found by tables."""
        paired = (each for each in self.columns if each.pairs is not None)
        return frozenset(each.prefix for each in paired if each.has(shard))

    def together(self, shard: int) -> list[int]:
        """Return the numbers in `planned` of a shard and those beside it, in reading order."""
        return [shard, *chain.from_iterable(self.beside(shard).values())]

    def url_of(self, url: str, extension: str) -> str:
        """Return the urls of the shards that have the members with an extension, for messages.

        Args:
            url: of a shard. It has these members itself, unless a joined shard has them.
            extension: of the members.
        """
        shard = [*self.shards.urls].index(url)
        beside = self.beside(shard).items()
        joined = [shards for prefix, shards in beside if extension.startswith(prefix)]
        if not joined:
            return url
        return " or ".join(self.planned[number].url for number in joined[-1])

    @cached_property
    def counts(self) -> list[int] | None:
        """Number of samples of each shard that belong to the dataset; None unless all are known."""
        if self.uncounted:
            return None
        each = zip(self.shards.samples, self.choices or repeat(None), strict=False)
        return [count if choice is None else choice.count for count, choice in each]

    @property
    def samples(self) -> int | None:
        """Number of samples of all shards; None unless all are known."""
        return None if self.counts is None else sum(self.counts)

    @property
    def uncounted(self) -> int:
        """Number of shards whose samples are not counted."""
        return self.shards.samples.count(-1)

    def uncounted_error(self, what: str) -> ConfigError:
        """Return the error for a dataset that has to know its numbers of samples."""
        return ConfigError(
            f"{what}: {self.uncounted} of {len(self)} shards were never counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use "
            "index.json as the url",
        )

    def chosen(self, shard: int) -> Sequence[int] | None:
        """Return the numbers in the tar of a shard's samples that belong to the dataset, ascending.

        None for all.
        """
        if self.choices is None:
            return None
        choice = self.choices[shard]
        return None if choice is None else choice.numbers()

    def select(self, choices: Choices) -> Self:
        """Return the manifest of the samples chosen among those of this one."""
        before = self.choices or repeat(None)
        return replace(self, choices=tuple(map(narrowed, before, choices)))

    @cached_property
    def selection(self) -> str:
        """32 hexadecimal digits that identify the choices among the samples; empty without any."""
        if self.choices is None:
            return ""
        return digest(repr(choice).encode() for choice in self.choices)

    @cached_property
    def objects(self) -> str:
        """32 hexadecimal digits that identify the shards' urls, whatever signatures these have."""
        urls = self.shards.urls
        if b"?" in urls.text:
            unsigned = [without_signature(url).encode() for url in urls]
            urls = Texts.of(map(len, unsigned), b"".join(unsigned))
        return urls.fingerprint

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that two manifests share if and only if their shards are equal."""
        return self.shards.fingerprint

    def difference(self, other: "Manifest") -> str | None:
        """Describe the first shard in which the other manifest differs from this one.

        None if they are equal.
        """
        pairs = zip_longest(self.shards, other.shards)
        for number, (here, there) in enumerate(pairs):
            if here != there:
                return f"shard {number} is {_described(here)} here and {_described(there)} there"
        return None


def _described(shard: ShardRef | None) -> str:
    if shard is None:
        return "missing"
    facts = {"version": shard.version, "bytes": shard.size_bytes, "samples": shard.samples}
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{shard.url} ({known or 'nothing else known'})"
