"""Expansion of a dataset's patterns, prefixes, index files and urls into shards.

- A shard is an object that holds many samples, such as a tar. A file is an object whose own bytes
  are wanted.
- A prefix is the beginning of urls that are listed.
- An index file lists a dataset's shards, and may state how many samples each of them has. A foreign
  list is an index file in the form of another program.
- A split is a named part of a dataset, such as `train`. Only foreign lists have splits.
- A key split is something else, a rule for tars: it says at which dot a member's name is split into
  the sample's key and the field's name. There are two, the first dot and the last.
"""

import asyncio
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import structlog

from shardcache.access.deceptive import checked, is_sound
from shardcache.access.urls import glob_prefix, is_glob, join
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns import foreign_lists
from shardcache.origin.patterns.braces import check_shard_count, expand_braces, with_braces
from shardcache.origin.patterns.foreign_lists import NamedShards
from shardcache.origin.patterns.globs import glob_regex
from shardcache.origin.patterns.index_files import MAX_INDEX_BYTES, parse_index, shards_of_list
from shardcache.origin.registry import Origins
from shardcache.origin.whole_object import read_object
from shardcache.shared.exceptions import ConfigError, NotAnIndexError, NotFoundError
from shardcache.shared.formats.format_table import SUFFIXES, plain_suffixes
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.tarindex.key_splits import FIRST_DOT, key_split_in, with_key_split
from shardcache.shared.units import size
from shardcache.shared.urls.url_names import (
    format_of,
    is_index,
    is_shard,
    is_surely_a_shard,
    is_tar_or_unnamed,
    split_of,
)
from shardcache.transport.between.flow import Flow, Received, nothing

log = structlog.get_logger()

# Name of the file in which formats such as MDS list the shards of the same folder.
_FORMAT_INDEX = "index.json"
# Values of `expand`'s argument `wanted` for which a prefix without shards stands for its files.
_SHARDS_OR_FILES = ("shards", "either")
# Values for which a prefix that has shards stands for the shards alone.
_SHARDS_FIRST = ("samples", *_SHARDS_OR_FILES)

Indexes = MutableMapping[tuple[str, str], Shards]
"""The shards of index files that have been read, by the file's url and version."""


async def expand(
    pattern: str,
    origins: Origins,
    received: Received = nothing,
    indexes: Indexes | None = None,
    wanted: Wanted = "samples",
) -> Shards:
    """Return the shards that a pattern expands to.

    Braces are expanded first, without a request. Each result is then one of these:

    - a glob (`*`, `?`, `[...]`, `**`), sorted by url; or the object with exactly this url, if there
      is one;
    - a prefix that ends in "/": every shard below it, sorted by url; or, if their format lists its
      shards in an index.json, the content of that file;
    - an index file: .json in wids format, or a list by another program (`foreign_lists`), in the
      file's order;
    - a shard's url.

    Sizes and versions are set where a listing states them.

    A listed key that is not a valid url, such as a key with control characters, is left out and
    logged. If "files" or "entries" are wanted, the key is returned as well, but cannot be fetched.

    Args:
        pattern: one pattern, prefix, index file or url.
        origins: the origins that are listed and read.
        received: called with numbers of objects and bytes as they arrive.
        indexes: index files that need not be read again; those that are read are added. None to
            read every index file.
        wanted: the kind of objects to return:

            - "samples": shards only. An index file must list shards.
            - "files": a prefix stands for every file below it, and a url for itself, unless it is
              an index file of this project's form, which stands for the files that it lists.
            - "shards": the same as "samples" if there is a shard, otherwise the same as "files".
            - "either": the same as "shards", but fewer files count as shards; see below.
            - "entries": the pattern is the url of a folder, without any special characters. It
              stands for the files and folders directly below the folder.

            Files in some formats, such as JSON Lines, are often not shards. Below a prefix, such
            files count as shards only if there are no other shards. With "either", they never do.

    Raises NotFoundError for a pattern without shards, ConfigError for an invalid one, and the
    origin's errors.
    """
    expansion = _Expansion(origins, received, {} if indexes is None else indexes, wanted)
    if wanted == "entries":
        return await expansion.entries(checked(pattern))

    lists: list[Shards] = []
    without_key_split, key_split = key_split_in(pattern)
    # Like `checked` above, this raises ConfigError for a url that nobody may request.
    urls = await asyncio.to_thread(expand_braces, without_key_split)
    count = 0
    for url in urls:
        shards_of_url = await expansion.shards(url)
        lists.append(shards_of_url)
        count += len(shards_of_url)
        check_shard_count(count, pattern)
    shards = await asyncio.to_thread(Shards.joined, lists)
    return await asyncio.to_thread(_with_key_split, shards, key_split, pattern)


def named_by_braces(pattern: str) -> Shards | None:
    """Return a pattern's shards without any request. Blocks.

    Returns None if braces alone do not determine the shards, so that the origin has to be asked.
    Raises ConfigError for an invalid pattern.
    """
    without_key_split, key_split = key_split_in(pattern)
    # This comes first, so that an invalid pattern raises its error in either case.
    urls = expand_braces(without_key_split)
    if _pattern_needs_request(without_key_split):
        return None
    return _with_key_split(Shards.of(map(ShardRef, urls)), key_split, pattern)


def _with_key_split(shards: Shards, key_split: str, pattern: str) -> Shards:
    """Return shards whose urls state the key split. Blocks.

    Args:
        shards: the shards that the pattern without its key split expands to.
        key_split: the pattern's key split; `FIRST_DOT`, the default, changes nothing.

    Raises the errors of `_check_key_split`.
    """
    if key_split == FIRST_DOT:
        return shards
    for ref in shards:
        _check_key_split(ref, key_split, pattern)
    return Shards.of(ref._replace(url=with_key_split(ref.url, key_split)) for ref in shards)


def _check_key_split(ref: ShardRef, key_split: str, pattern: str) -> None:
    """Raise ConfigError if a shard cannot be read with a key split other than `FIRST_DOT`.

    It cannot if it is not a tar, or if an index has counted its samples by the first dot: the last
    dot groups the members into other samples.
    """
    if not is_tar_or_unnamed(ref.url):
        raise ConfigError(
            "key_split is for tars: the keys of another format are its own",
            url=ref.url,
            remedy="omit key_split",
        )
    # An index that was made by the last dot states that in the shards' urls. Any other index has
    # counted the samples by the first dot.
    states_key_split = ref.url == with_key_split(ref.url, key_split)
    if ref.samples is not None and not states_key_split:
        raise ConfigError(
            "the index counts samples whose keys end at the first dot of a name",
            url=pattern,
            remedy="index the shards again: shardcache index --key-split last-dot URL... -o "
            "index.json; such an index says by itself where names are split",
        )


def _pattern_needs_request(pattern: str) -> bool:
    """Return whether the origin has to be asked for the shards of a pattern. Blocks.

    Otherwise braces alone determine its shards.

    Args:
        pattern: a pattern without a key split.
    """
    # NeMo writes ranges in brackets, as in `[0..9]`, which would look like a wildcard.
    braced = with_braces(pattern)
    if _url_needs_request(braced):
        return True
    # The pattern as a whole needs no request, but one of its expansions may, as in
    # `data/{a.tar,b/}`. Wildcards within braces have been found above, so only the ends of the
    # expansions matter. If the pattern ends with a shard's suffix, so do all of them.
    if "{" not in braced or braced.endswith(SUFFIXES):
        return False
    # This takes the pattern as the user wrote it, since it may be the name of a local file.
    return any(map(_url_needs_request, expand_braces(pattern)))


def _url_needs_request(url: str) -> bool:
    """Return whether a url, or a pattern by its end or wildcards, has to be listed or read."""
    return url.endswith("/") or is_index(url) or is_glob(url)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Expansion of the urls of one pattern.

    Attributes:
        origins: origins of the urls.
        received: called with numbers of objects and bytes as they arrive.
        indexes: index files that need not be read again; those that are read are added.
        wanted: the kind of objects to return, as for `expand`.
    """

    origins: Origins
    received: Received
    indexes: Indexes
    wanted: Wanted

    async def shards(self, url: str) -> Shards:
        """Return the shards of a url without braces. Raises as `expand`."""
        if is_glob(url):
            objects = await self._glob_matches(url)
            return self._not_empty(url, _as_shards(url, objects, self.wanted))
        if url.endswith("/"):
            listing = await self.origins.origin(url).list_prefix(url, self.received)
            shards = await self._from_format_index(url, listing)
            if shards is not None:
                return shards
            objects = _wanted_below(url, listing, self.wanted)
            return self._not_empty(url, _as_shards(url, objects, self.wanted))
        if is_index(url):
            return await self.from_index(url)
        return Shards.of([ShardRef(url)])

    async def entries(self, folder: str) -> Shards:
        """Return the files and folders directly below a folder."""
        origin = self.origins.origin(folder)
        listing = await origin.list_prefix(folder, self.received, flat=True)
        inside = [obj for obj in listing if obj.url != folder]
        return self._not_empty(folder, _as_shards(folder, inside, self.wanted))

    async def from_index(self, url: str) -> Shards:
        """Return the shards that an index file lists.

        A file that turns out not to be an index is returned as a file itself, unless samples are
        wanted. Raises NotAnIndexError in that case, and the origin's errors.

        Args:
            url: the index file's url; after it, a split may be named, as in `#train`.
        """
        file_url, split = split_of(url)
        file = await self.origins.origin(file_url).stat(file_url)
        already_read = self.indexes.get((url, file.version))
        if already_read is not None:
            return already_read
        try:
            return await self._read_index(url, file, split)
        except NotAnIndexError:
            if self.wanted == "samples":
                raise
            return Shards.of([_shard_ref(file)])

    async def _read_index(self, url: str, file: RemoteObject, split: str | None) -> Shards:
        """Return the shards of an index file or of another program's list, which is read now.

        Raises NotAnIndexError for any other file.

        Args:
            url: the url of `file`, with the name of the split if there is one.
            file: the file as an object.
            split: name of the split; None if the url names none.
        """
        data = await self._read_list(file)
        try:
            shards = await asyncio.to_thread(parse_index, file.url, data, split)
        except NotAnIndexError:
            if self.wanted == "files":  # then another program's list is a file like any other
                raise
            foreign = await self._from_foreign_list(file.url, data, split)
            if foreign is None:
                raise
            # This is not kept in `indexes`, whose key has the version of one file: it may have the
            # numbers of samples from a second file.
            return self._not_empty(url, foreign)
        self.indexes[url, file.version] = self._not_empty(url, shards)
        return shards

    async def _glob_matches(self, glob: str) -> list[RemoteObject]:
        """Return all objects that a glob matches.

        If there is an object whose url is exactly the glob's text, only that object is returned.
        """
        match = glob_regex(glob).fullmatch
        prefix = glob_prefix(glob)
        # Such a glob matches only objects directly below the prefix: no others need to be listed.
        is_flat = "/" not in glob.removeprefix(prefix) and "**" not in glob
        origin = self.origins.origin(glob)
        listing = await origin.list_prefix(prefix, self.received, flat=is_flat)
        literal = [obj for obj in listing if obj.url == glob]
        if literal:
            return literal
        return [obj for obj in listing if match(obj.url)]

    async def _from_format_index(
        self,
        prefix: str,
        listing: Sequence[RemoteObject],
    ) -> Shards | None:
        """Return the shards that the index.json directly below a prefix lists.

        Returns None if the shards below the prefix are to be taken from the listing instead: there
        is no such file, or it is not an index, or some shards are in a format without index.json.

        Args:
            listing: all objects below the prefix.
        """
        if self.wanted not in _SHARDS_FIRST:
            return None
        index = prefix + _FORMAT_INDEX
        has_index = any(obj.url == index for obj in listing)
        if not has_index:
            return None
        shards = _shards_among(listing, self.wanted)
        # A format has `lists` if its own writer makes an index.json.
        if not shards or not all(format_of(obj.url).has_index_files for obj in shards):
            return None
        # `from_index` raises NotAnIndexError only if samples are wanted. Otherwise it would return
        # an index.json that is not an index as a file.
        for_samples = replace(self, wanted="samples")
        try:
            return await for_samples.from_index(index)
        except NotAnIndexError as exn:
            log.warning("shards are listed without their index.json", url=index, cause=exn.message)
            return None

    async def _read_list(self, obj: RemoteObject) -> bytes:
        """Return the bytes of an index file. Raises NotAnIndexError if it is too large."""
        if obj.size_bytes > MAX_INDEX_BYTES:
            raise NotAnIndexError(
                f"the file is too large for an index ({size(obj.size_bytes)})",
                url=obj.url,
            )
        return await read_object(self.origins.origin(obj.url), obj, Flow(self.received))

    async def _from_foreign_list(self, url: str, data: bytes, split: str | None) -> Shards | None:
        """Return the shards of a list that another program has written.

        Returns None if the file is not such a list.

        Args:
            url: the list's url.
            data: the list's bytes.
            split: the split of the dataset to return; None if the url names none.
        """
        listed = await asyncio.to_thread(foreign_lists.parse, url, data, split)
        if listed is None:
            return None
        counted = await self._with_counts(url, listed)
        return await asyncio.to_thread(shards_of_list, counted)

    async def _with_counts(self, url: str, listed: NamedShards) -> NamedShards:
        """Return listed shards with their numbers of samples, if a second file states these.

        Args:
            url: the list's url.
            listed: the shards; `counts_in` has the names that the second file may have.
        """
        for name in listed.counts_in:
            counts_url = join(url, name)
            try:
                obj = await self.origins.origin(counts_url).stat(counts_url)
            except NotFoundError:
                continue
            data = await self._read_list(obj)
            # A list of counts has no splits.
            counts = await asyncio.to_thread(foreign_lists.parse, counts_url, data, split=None)
            if counts is not None:
                return listed.counted_by(counts)
        return listed

    def _not_empty(self, pattern: str, shards: Shards) -> Shards:
        """Return a pattern's shards unchanged. Raises NotFoundError if there are none."""
        if shards:
            return shards
        remedy = "check it for typos"
        if is_glob(pattern):
            remedy += "; in a name, `[` is written `[[]`, `*` is `[*]`, and `?` is `[?]`"
        elif self.wanted == "samples":
            suffixes = ", ".join(plain_suffixes())
            remedy += f"; a prefix matches only {suffixes}, plain or compressed"
        kind = "shard" if self.wanted == "samples" else "file"
        raise NotFoundError(f"no {kind} matches", url=pattern, remedy=remedy)


def _wanted_below(
    prefix: str,
    listing: Sequence[RemoteObject],
    wanted: Wanted,
) -> list[RemoteObject]:
    """Return the objects below a prefix that are wanted: shards or files."""
    files = [obj for obj in listing if not obj.url.endswith("/")]
    shards = _shards_among(files, wanted)
    if wanted == "files" or (wanted in _SHARDS_OR_FILES and not shards):
        return files

    shard_urls = {obj.url for obj in shards}
    left_out = [obj.url for obj in files if obj.url not in shard_urls]
    if left_out:
        log.info(
            "files below the prefix that are not shards are left out",
            url=prefix,
            files=len(left_out),
            first=left_out[0],
        )
    return shards


def _shards_among(files: Sequence[RemoteObject], wanted: Wanted) -> list[RemoteObject]:
    """Return the shards among the files below a prefix.

    A file in a format such as JSON Lines or parquet may also be a list of the dataset's samples. It
    counts as a shard only if there are no other shards; with "either", it never does.
    """
    sure_shards = [obj for obj in files if is_surely_a_shard(obj.url)]
    if sure_shards or wanted == "either":
        return sure_shards
    return [obj for obj in files if is_shard(obj.url)]


def _as_shards(pattern: str, objects: Sequence[RemoteObject], wanted: Wanted) -> Shards:
    """Return listed objects as shards.

    Keys that are not valid urls are left out. But if files or entries are wanted, these keys are
    returned as well, to be shown; a request for such a file is refused.
    """
    invalid = [obj for obj in objects if not is_sound(obj.url)]
    if not invalid:
        return Shards.of(map(_shard_ref, objects))

    log.warning(
        "keys below the prefix that are not valid urls cannot be fetched",
        url=pattern,
        files=len(invalid),
        first=_printable(invalid[0].url),
    )
    if wanted in ("files", "entries"):
        return Shards.of(
            ShardRef(_printable(obj.url), obj.version, obj.size_bytes) for obj in objects
        )
    left_out = {obj.url for obj in invalid}
    return Shards.of(_shard_ref(obj) for obj in objects if obj.url not in left_out)


def _printable(url: str) -> str:
    """Return a key as valid Unicode: other bytes, as in names of local files, are escaped."""
    return url.encode(errors="backslashreplace").decode()


def _shard_ref(obj: RemoteObject) -> ShardRef:
    """Return an object as a shard. Raises ConfigError if its url is invalid."""
    return ShardRef(checked(obj.url), obj.version, obj.size_bytes)
