"""The shards of a dataset, with the names that plans give them.

A plan names a shard by its key in the cache if its version is known, otherwise by its place, which
is usually the url: see `store.keys.place_of`. `Manifests` makes listings; readers' plans use them.

`Wanted` says what readers want of the objects in a listing: "samples" of all of them, "shards" or
"either" if the name of each object decides between its samples and its own bytes, or the own bytes
of all of them ("files", "ranges", "objects").
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.urls.url_names import is_shard, is_surely_a_shard
from shardcache.store.keys import place_of, shard_key

# Memory that an empty list takes.
_LIST_BYTES = 16_384
# Memory that each shard takes besides its url and version, whose texts are counted by their
# lengths.
_ROW_BYTES = 168


@lru_cache(4096)
def name_of(ref: ShardRef) -> str:
    """Return the name of a shard in plans.

    Names are cached: a name may be a hash, and the name of a file is asked for with each range that
    is read of it.
    """
    place = place_of(ref.url, is_file=ref.is_file)
    return _name(place, ref.version)


def _name(place: str, version: str | None) -> str:
    """Return the key of a place in a version; the place itself if the version is unknown."""
    if not version:
        return place
    return shard_key(place, version)


class Listing:
    """The shards of a dataset, as plans name them.

    Attributes:
        shards: the shards, in the order of their numbers.
        names: the name of each shard in plans.
        remembered: number of shards whose number of samples is in this daemon's catalogue only, so
            that the daemons of other nodes may not know it.
        memory_bytes: memory that the list takes.
    """

    def __init__(
        self,
        shards: Shards,
        names: Sequence[str] = (),
        remembered: int = 0,
        wanted: Wanted = "samples",
    ) -> None:
        """Build from the shards. Blocks.

        Args:
            shards: the shards.
            names: names of the shards; if empty, they are made from urls and versions.
            remembered: see the attribute.
            wanted: says which of the objects are read as shards, and which as files or by ranges.
        """
        self.shards = shards
        self.remembered = remembered
        self._wanted = wanted
        self.names = names or self._all_names()
        texts_bytes = len(shards.urls.text) + len(shards.versions.text)
        self.memory_bytes = _LIST_BYTES + _ROW_BYTES * len(shards) + texts_bytes

    def _all_names(self) -> list[str]:
        """Return the name of each shard, made from its url and version."""
        places = (place_of(url, is_file=self._is_file(url)) for url in self.shards.urls)
        versions = self.shards.versions
        return [_name(place, version) for place, version in zip(places, versions, strict=True)]

    def _is_file(self, url: str) -> bool:
        """Return whether an object's own bytes are wanted, rather than its samples."""
        if self._wanted == "shards":
            return not is_shard(url)
        if self._wanted == "either":
            return not is_surely_a_shard(url)  # a name such as x.jsonl counts as a file's
        return self._wanted in ("files", "ranges", "objects")

    @property
    def is_of_ranges(self) -> bool:
        """True if only ranges that readers request are fetched, and nothing ahead by the plan."""
        return self._wanted == "ranges"

    def ref(self, number: int) -> ShardRef:
        """Return a shard or a file by its number."""
        ref = self.shards[number]
        if self._is_file(ref.url):
            return ref._replace(is_file=True)
        return ref

    def unversioned(self, numbers: Iterable[int]) -> list[tuple[str, str]]:
        """Return name and url of those of some shards whose version is not stated."""
        urls = self.shards.urls
        versions = self.shards.versions
        distinct = dict.fromkeys(numbers)
        return [(self.names[number], urls[number]) for number in distinct if not versions[number]]

    def refs(self) -> Sequence[ShardRef]:
        """Return all shards and files. Blocks."""
        if self._wanted == "samples":  # all are read as shards
            return self.shards
        return [self.ref(number) for number in range(len(self.shards))]

    def read_as(self, wanted: Wanted) -> "Listing":
        """Return the same shards to be read in another way, as `wanted` says. Blocks."""
        if wanted == self._wanted:
            return self
        # Names are made again, as the name of a file differs from that of a shard.
        return Listing(self.shards, remembered=self.remembered, wanted=wanted)

    @classmethod
    def joined(cls, lists: Sequence["Listing"]) -> "Listing":
        """Return the shards of several lists, one after another, to be read for samples. Blocks.

        `remembered` is 0, as the reader got each list's number when that list was resolved.
        """
        shards = Shards.joined([each.shards for each in lists])
        names = [name for each in lists for name in each.names]
        return cls(shards, names)
