"""The shards of a dataset, with the names that plans give them.

`Manifests` makes listings; readers' plans use them. A plan names a shard by its key in the cache if
the shard's version is known, and otherwise by its place. The place is usually the url; see
`store.keys.place_of`.

`Wanted` says how readers use the objects in a listing:

- "samples": they read the samples of each object.
- "files", "ranges", "objects": they read the bytes of each object.
- "shards", "either": the name of each object decides between these two.
- "entries": they only see which entries a folder has.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.urls.url_names import is_shard, is_surely_a_shard
from shardcache.store.keys import place_of, shard_key

# Memory that an empty listing takes, and that each shard takes in addition to the texts of its url
# and version.
_LISTING_BYTES = 16_384
_ROW_BYTES = 168


@lru_cache(4096)
def name_of(ref: ShardRef) -> str:
    """Return the name of a shard in plans.

    Names are cached, since a name may be a hash, and the name of a file is needed for each range
    that is read of it.
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
        remembered_counts: number of shards whose sample count comes from this daemon's catalogue,
            so that the daemons of other nodes may not know it.
        memory_bytes: memory that the listing takes.
    """

    def __init__(
        self,
        shards: Shards,
        names: Sequence[str] = (),
        remembered_counts: int = 0,
        wanted: Wanted = "samples",
    ) -> None:
        """Build from the shards. Blocks.

        Args:
            shards: the shards.
            names: names of the shards; if empty, they are made from urls and versions.
            remembered_counts: see the attribute.
            wanted: says how the objects are read.
        """
        self.shards = shards
        self.remembered_counts = remembered_counts
        self._wanted = wanted
        self.names = names or self._all_names()
        texts_bytes = len(shards.urls.text) + len(shards.versions.text)
        self.memory_bytes = _LISTING_BYTES + _ROW_BYTES * len(shards) + texts_bytes

    def _all_names(self) -> list[str]:
        """Return the name of each shard, made from its url and version."""
        places = (place_of(url, is_file=self._is_file(url)) for url in self.shards.urls)
        versions = self.shards.versions
        return [_name(place, version) for place, version in zip(places, versions, strict=True)]

    def _is_file(self, url: str) -> bool:
        """Return True if the bytes of an object are wanted, False if its samples are."""
        if self._wanted == "shards":
            return not is_shard(url)
        if self._wanted == "either":
            return not is_surely_a_shard(url)  # a name such as x.jsonl counts as a file's
        return self._wanted in ("files", "ranges", "objects")

    @property
    def is_for_ranges(self) -> bool:
        """True if only the ranges that readers request are fetched, and nothing ahead of them."""
        return self._wanted == "ranges"

    def ref(self, number: int) -> ShardRef:
        """Return a shard or file by its number."""
        ref = self.shards[number]
        if self._is_file(ref.url):
            return ref._replace(is_file=True)
        return ref

    def unversioned(self, numbers: Iterable[int]) -> list[tuple[str, str]]:
        """Return (name, url) of each of the given shards whose version is unknown.

        Args:
            numbers: numbers of shards; repeated numbers count once.
        """
        urls = self.shards.urls
        versions = self.shards.versions
        distinct = dict.fromkeys(numbers)
        return [(self.names[number], urls[number]) for number in distinct if not versions[number]]

    def refs(self) -> Sequence[ShardRef]:
        """Return all shards and files. Blocks."""
        if self._wanted == "samples":  # none is a file
            return self.shards
        return [self.ref(number) for number in range(len(self.shards))]

    def read_as(self, wanted: Wanted) -> "Listing":
        """Return a listing of the same shards that are read in the way `wanted`. Blocks."""
        if wanted == self._wanted:
            return self
        # Names are made again, since the name of a file differs from that of a shard.
        return Listing(self.shards, remembered_counts=self.remembered_counts, wanted=wanted)

    @classmethod
    def joined(cls, listings: Sequence["Listing"]) -> "Listing":
        """Return the shards of several listings, one after another, read for their samples. Blocks.

        `remembered_counts` is 0: readers were told each listing's number when it was resolved.
        """
        shards = Shards.joined([listing.shards for listing in listings])
        names = [name for listing in listings for name in listing.names]
        return cls(shards, names)
