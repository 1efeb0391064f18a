"""The shards of a dataset, the shards that are joined to them, and the chosen samples. Pure.

A manifest is the list of a dataset's shards, which the daemon makes from the user's urls. A shard's
number is its index in the manifest, and a shard is counted if the number of its samples is known.

A dataset may be joined with others, which have further members of the same samples, under the same
keys. The shards of the first dataset are then the main shards, and each other dataset is a column.
A main shard is read together with its joined shards, those of each column with the same keys.

A choice is the samples of a shard that belong to the dataset if the user has selected some.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat, zip_longest
from typing import Any, Self

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.lists.shard_columns import Shards, Texts, digest
from shardcache.shared.protocol import ShardRef
from shardcache.shared.urls.signed_urls import without_signature
from shardcache.shared.urls.url_names import may_name_index
from shardcache_client.order.shards.choices import Choices, narrowed


@dataclass(frozen=True, slots=True)
class JoinedManifest:
    """A column of joined shards.

    Attributes:
        prefix: put before the names of the column's members in samples, such as "cap.".
        manifest: all shards of the column.
        pairs: for each main shard, the numbers of its joined shards, as tables of keys list them;
            None if joined shard n belongs to main shard n.
        first_shard: number of the first main shard that has joined shards; not 0 if several
            datasets are mixed.
        repeated: for each main shard, its keys that another main shard has as well; empty if
            unknown.
    """

    prefix: str
    manifest: "Manifest"
    pairs: tuple[tuple[int, ...], ...] | None = None
    first_shard: int = 0
    repeated: tuple[frozenset[bytes], ...] = ()

    def has(self, shard: int) -> bool:
        """Return True if this column has joined shards for a main shard, given by its number."""
        main_shards = len(self.manifest) if self.pairs is None else len(self.pairs)
        return 0 <= shard - self.first_shard < main_shards

    def joined_to(self, shard: int) -> tuple[int, ...]:
        """Return the numbers, in this column, of the joined shards of a main shard."""
        nth = shard - self.first_shard
        if self.pairs is None:
            return (nth,)
        return self.pairs[nth]

    def repeated_in(self, shard: int) -> frozenset[bytes]:
        """Return the keys of a main shard that another main shard has as well."""
        nth = shard - self.first_shard
        if 0 <= nth < len(self.repeated):
            return self.repeated[nth]
        return frozenset()


@dataclass(frozen=True)
class Manifest(Sequence[ShardRef]):
    """The shards in the order of the dataset's urls; immutable, comparable between processes.

    Attributes:
        shards: the shards, with version, size and number of samples where known.
        counts_listed: True if all numbers of samples come from index files, and so are the same on
            every node. Any other number is known only to nodes that have fetched the shard.
        versions_named: True if index files may name the versions that are wanted. False if the
            versions are from a listing of the store, and so merely those that were current.
        choices: the samples of each shard that belong to the dataset; None for all samples.
        lists: fingerprints of the daemon's lists that `shards` was made from; empty if `shards` is
            itself a list of the daemon's, unchanged.
        columns: the datasets that are joined to this one.
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
            urls: the urls that were asked for; empty if they are unknown.
        """
        shards = Shards.unpack(answer["packed"])
        # The fingerprint is computed here once, so that the workers that are forked from this
        # process need not compute it each.
        _ = shards.fingerprint
        # Number of shards whose number of samples is known to this daemon alone. If the answer does
        # not say, there may be some.
        counts_of_node = answer.get("remembered", 1)
        return cls(
            shards,
            counts_listed=counts_of_node == 0,
            versions_named=not urls or any(map(may_name_index, urls)),
        )

    @classmethod
    def concatenated(cls, manifests: "Sequence[Manifest]") -> Self:
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
        """Return a manifest of some of these shards only, without their choices and columns.

        Args:
            numbers: numbers of the shards.
        """
        shards = Shards.of(map(self.__getitem__, numbers))
        return Manifest(
            shards, counts_listed=self.counts_listed, versions_named=self.versions_named
        )

    @property
    def is_replaceable(self) -> bool:
        """True if a shard may be read in a version other than the listed one.

        The other version must have the same number of samples.
        """
        # Choices have sample numbers, which are those of the listed versions.
        return self.choices is None and not self.versions_named

    def of_blocks(self, count: Callable[[int, int], int]) -> "Manifest":
        """Return the same shards with blocks of tokens as their samples. Raises ConfigError.

        Args:
            count: returns the number of blocks of a shard, given its numbers of tokens and samples.
        """
        tokens = self.shards.tokens
        samples = self.shards.samples
        # Both must be known of all shards; -1 is an unknown number.
        incomplete = tokens if -1 in tokens else samples
        if -1 in incomplete:
            raise ConfigError(
                f"the tokens of {incomplete.count(-1)} of {len(self)} shards were never counted",
                url=self[incomplete.index(-1)].url,
                remedy="count them once with `shardcache index URL... --tokens npy -o index.json` "
                "(or --tokens tok:uint16 for plain arrays), and use index.json as the url",
            )
        shards = self.shards.with_samples(map(count, tokens, samples))
        # The daemon knows only the list with the shards' own numbers of samples.
        return replace(self, shards=shards, lists=(self.fingerprint,))

    @cached_property
    def planned(self) -> "Manifest":
        """All shards that are read: these shards, then all shards of each column."""
        if not self.columns:
            return self
        alone = replace(self, columns=())
        return Manifest.concatenated([alone, *(column.manifest for column in self.columns)])

    def joined_to(self, shard: int) -> dict[str, list[int]]:
        """Return the joined shards of a shard, by the prefix of their column.

        The joined shards are given as their numbers in `planned`.
        """
        joined = {}
        first_of_column = len(self)
        for column in self.columns:
            if column.has(shard):
                numbers = column.joined_to(shard)
                joined[column.prefix] = [first_of_column + number for number in numbers]
            first_of_column += len(column.manifest)
        return joined

    def repeated_in(self, shard: int) -> frozenset[bytes]:
        """Return the keys of a shard that another shard has as well, as far as tables say so.

        Samples with such keys are joined to no others, since the key names several samples.
        """
        return frozenset().union(*(column.repeated_in(shard) for column in self.columns))

    def paired_by_tables(self, shard: int) -> frozenset[str]:
        """Return the prefixes of the columns whose `pairs` list the joined shards of a shard."""
        paired = (each for each in self.columns if each.pairs is not None)
        return frozenset(each.prefix for each in paired if each.has(shard))

    def with_joined(self, shard: int) -> list[int]:
        """Return a shard and its joined shards as numbers in `planned`, in reading order."""
        return [shard, *chain.from_iterable(self.joined_to(shard).values())]

    def url_of(self, url: str, extension: str) -> str:
        """Return the url of the shard that has a member of a sample, for a message.

        If it may be one of several joined shards, their urls are joined by "or".

        Args:
            url: url of the sample's main shard.
            extension: name of the member, with the prefix of its column.
        """
        shard = [*self.shards.urls].index(url)
        # Several prefixes may fit, such as "a." and "a.b."; the last column's is taken.
        candidates: list[int] = []
        for prefix, numbers in self.joined_to(shard).items():
            if extension.startswith(prefix):
                candidates = numbers
        if not candidates:
            return url
        return " or ".join(self.planned[number].url for number in candidates)

    @cached_property
    def counts(self) -> list[int] | None:
        """Number of samples of each shard that belong to the dataset; None unless all are known."""
        if self.uncounted:
            return None
        # `repeat` has no end: the shards end the zip.
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
        """Return the error for a dataset whose shards have to be counted and are not.

        Args:
            what: the statement that needs the counts; the message begins with it.
        """
        return ConfigError(
            f"{what}: {self.uncounted} of {len(self)} shards were never counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use "
            "index.json as the url",
        )

    def chosen(self, shard: int) -> Sequence[int] | None:
        """Return the numbers in the tar of a shard's samples that belong to the dataset, ascending.

        None if all samples belong to it.
        """
        if self.choices is None:
            return None
        choice = self.choices[shard]
        return None if choice is None else choice.numbers()

    def select(self, choices: Choices) -> Self:
        """Return a manifest with only the samples chosen among the samples of this manifest."""
        before = self.choices or repeat(None)
        return replace(self, choices=tuple(map(narrowed, before, choices)))

    @cached_property
    def selection(self) -> str:
        """32 hexadecimal digits that identify the choices of samples; empty if all are chosen."""
        if self.choices is None:
            return ""
        return digest(repr(choice).encode() for choice in self.choices)

    @cached_property
    def objects(self) -> str:
        """32 hexadecimal digits that identify the shards' urls, without the urls' signatures."""
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

        None if all shards are equal.
        """
        pairs = zip_longest(self.shards, other.shards)
        for number, (own, others) in enumerate(pairs):
            if own != others:
                return f"shard {number} is {_described(own)} here and {_described(others)} there"
        return None


def _described(shard: ShardRef | None) -> str:
    """Return a description of a shard for a message; None for a shard that is missing."""
    if shard is None:
        return "missing"
    facts = {"version": shard.version, "bytes": shard.size_bytes, "samples": shard.samples}
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{shard.url} ({known or 'nothing else known'})"
