"""Expansion of a dataset's patterns, prefixes, index files and urls into shards."""

import asyncio
from collections.abc import MutableMapping, Sequence

import structlog

from shardcache.access.deceptive import checked, is_sound
from shardcache.access.urls import glob_prefix, is_glob, join
from shardcache.errors import ConfigError, NotAnIndexError, NotFoundError
from shardcache.formats.table import SUFFIXES, plain_suffixes
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns import foreign_lists
from shardcache.origin.patterns.braces import check_number, expand_braces, in_braces
from shardcache.origin.patterns.globs import glob_regex
from shardcache.origin.patterns.index_files import MAX_INDEX_BYTES, parse_index, shards_of
from shardcache.origin.registry import Origins
from shardcache.origin.whole_object import read_object
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.units import size
from shardcache.shared.urls.url_names import (
    format_of,
    is_index,
    is_shard,
    is_shard_or_file,
    is_tar_or_unnamed,
    split_of,
)
from shardcache.tarindex.key_splits import FIRST_DOT, key_split_in, with_key_split
from shardcache.transport.between.flow import Flow, Received, nothing

log = structlog.get_logger()

# Name of the file in which formats such as MDS list the shards beside it.
_FORMAT_INDEX = "index.json"
# Values of `wanted` for which files are taken where there is no shard.
_SHARDS_OR_FILES = ("shards", "either")

Indexes = MutableMapping[tuple[str, str], Shards]
"""Index files that have been read, by url and version."""


async def expand(
    pattern: str,
    origins: Origins,
    received: Received = nothing,
    indexes: Indexes | None = None,
    wanted: Wanted = "samples",
) -> Shards:
    """Return the shards that a pattern expands to.

    Braces are expanded first, without a request; each result is then a glob (`*`, `?`, `[...]`,
    `**`; sorted by url), a prefix that ends in "/" (every shard below it; sorted by url), an index
    file (.json in wids format, or a list of another program's, `foreign_lists`; in its own order)
    or a shard's url. A glob that is an object's own url is that object. A prefix of shards whose
    format lists them in an index.json of its own is this file. Sizes and versions are set where a
    listing states them.

    A listed key that is not a valid url, such as one with control characters, is left out, and
    logged. If "files" or "entries" are wanted, it is listed as well: whoever fetches it is refused.

    Args:
        received: called with numbers of objects and bytes as they arrive.
        indexes: index files that are not read again; those that are read are added.
        wanted: with "files", a file that is not an index stands for itself, and a prefix for every
            file below it; with "shards" or "either", only if there is no shard. Below a prefix,
            files of formats that other programs use as often are shards only if there are no
            others, and with "either" never. With "entries", the pattern is a folder's own url,
            whatever its characters, and stands for the files and folders directly below it.

    Raises NotFoundError for a pattern without shards, ConfigError for an invalid one, and the
    origin's errors.
    """
    if wanted == "entries":
        return await _entries(checked(pattern), origins, received)

    if indexes is None:
        indexes = {}
    found: list[Shards] = []
    urls, key_split = key_split_in(pattern)
    for url in await asyncio.to_thread(expand_braces, urls):
        found.append(await _expand_one(url, origins, received, indexes, wanted))
        check_number(sum(map(len, found)), pattern)
    shards = await asyncio.to_thread(Shards.joined, found)
    return await asyncio.to_thread(_with_key_split, shards, key_split, pattern)


def named_by_braces(pattern: str) -> Shards | None:
    """Return the shards that braces alone determine; None if the origin has to be asked. Blocks."""
    named, key_split = key_split_in(pattern)
    urls = expand_braces(named)
    if asks_store(named):
        return None
    return _with_key_split(Shards.of(map(ShardRef, urls)), key_split, pattern)


def _with_key_split(shards: Shards, key_split: str, pattern: str) -> Shards:
    """Return shards with urls that say where names are split. Blocks.

    Raises ConfigError if they were counted by other keys, or are not tars.
    """
    if key_split == FIRST_DOT:
        return shards
    for ref in shards:
        if not is_tar_or_unnamed(ref.url):
            raise ConfigError(
                "key_split is for tars: the keys of another format are its own",
                url=ref.url,
                remedy="omit key_split",
            )
        if ref.samples is not None and ref.url != with_key_split(ref.url, key_split):
            raise ConfigError(
                "the index counts samples whose keys end at the first dot of a name",
                url=pattern,
                remedy="index the shards again: shardcache index --key-split last-dot URL... -o "
                "index.json; such an index says by itself where names are split",
            )
    return Shards.of(ref._replace(url=with_key_split(ref.url, key_split)) for ref in shards)


def asks_store(pattern: str) -> bool:
    """Return whether a pattern needs a request to the origin. Blocks.

    Otherwise braces alone determine its shards.
    """
    braced = in_braces(pattern)
    if _needs_request(braced):
        return True
    if "{" not in braced or braced.endswith(SUFFIXES):
        return False
    return any(map(_needs_request, expand_braces(pattern)))


def _needs_request(url: str) -> bool:
    return url.endswith("/") or is_index(url) or is_glob(url)


async def _expand_one(
    url: str,
    origins: Origins,
    received: Received,
    indexes: Indexes,
    wanted: Wanted,
) -> Shards:
    """Return the shards of a url without braces."""
    if is_glob(url):
        found = await _matching(url, origins, received)
        return _not_empty(url, _listed(url, found, wanted), wanted)
    if url.endswith("/"):
        found = await origins.origin(url).list_prefix(url, received)
        listed = await _listed_beside(url, found, origins, received, indexes, wanted)
        if listed is not None:
            return listed
        return _not_empty(url, _listed(url, _below(url, found, wanted), wanted), wanted)
    if is_index(url):
        return await _indexed(url, origins, received, indexes, wanted)
    return Shards.of([ShardRef(url)])


async def _listed_beside(
    prefix: str,
    found: Sequence[RemoteObject],
    origins: Origins,
    received: Received,
    indexes: Indexes,
    wanted: Wanted,
) -> Shards | None:
    """Return the shards that the index.json of another format lists directly below a prefix.

    None if there is none, or shards that no such file lists.
    """
    index = prefix + _FORMAT_INDEX
    if wanted not in ("samples", *_SHARDS_OR_FILES) or all(obj.url != index for obj in found):
        return None
    shards = _shards_among(found, wanted)
    if not shards or not all(format_of(obj.url).lists for obj in shards):
        return None
    try:
        return await _indexed(index, origins, received, indexes, "samples")
    except NotAnIndexError as exn:
        log.warning("shards are listed without their index.json", url=index, cause=exn.message)
        return None


async def _indexed(
    url: str,
    origins: Origins,
    received: Received,
    indexes: Indexes,
    wanted: Wanted,
) -> Shards:
    """Return the shards that an index file lists."""
    file, split = split_of(url)
    obj = await origins.origin(file).stat(file)
    known = indexes.get((url, obj.version))
    if known is not None:
        return known
    try:
        data = await _read_list(obj, origins, received)
        try:
            shards = await asyncio.to_thread(parse_index, file, data, split)
        except NotAnIndexError:
            if wanted == "files":  # another program's list is a file like any other then
                raise
            listed = await _listed_by_others(file, data, split, origins, received)
            if listed is None:
                raise
            return _not_empty(url, listed, wanted)
    except NotAnIndexError:
        if wanted == "samples":
            raise
        return Shards.of([_ref(obj)])
    indexes[url, obj.version] = _not_empty(url, shards, wanted)
    return shards


async def _read_list(obj: RemoteObject, origins: Origins, received: Received) -> bytes:
    """Return the bytes of an index file. Raises NotAnIndexError for a file that is too large."""
    if obj.size_bytes > MAX_INDEX_BYTES:
        raise NotAnIndexError(
            f"the file is too large for an index ({size(obj.size_bytes)})",
            url=obj.url,
        )
    return await read_object(origins.origin(obj.url), obj, Flow(received))


async def _listed_by_others(
    url: str,
    data: bytes,
    split: str | None,
    origins: Origins,
    received: Received,
) -> Shards | None:
    """Return the shards of a list that another program has written; None if it is not one."""
    listed = await asyncio.to_thread(foreign_lists.parse, url, data, split)
    if listed is None:
        return None
    for name in listed.counts_in:
        beside = join(url, name)
        try:
            obj = await origins.origin(beside).stat(beside)
        except NotFoundError:
            continue
        more = await _read_list(obj, origins, received)
        counts = await asyncio.to_thread(foreign_lists.parse, beside, more, None)
        if counts is not None:
            listed = listed.counted_by(counts)
            break
    return await asyncio.to_thread(shards_of, listed)


async def _entries(folder: str, origins: Origins, received: Received) -> Shards:
    """Return the files and folders directly below a folder."""
    found = await origins.origin(folder).list_prefix(folder, received, flat=True)
    inside = [obj for obj in found if obj.url != folder]
    return _not_empty(folder, _listed(folder, inside, "entries"), "entries")


async def _matching(glob: str, origins: Origins, received: Received) -> list[RemoteObject]:
    """Return the object whose own url this is, else all that the glob matches."""
    match = glob_regex(glob).fullmatch
    prefix = glob_prefix(glob)
    is_flat = "/" not in glob.removeprefix(prefix) and "**" not in glob
    found = await origins.origin(glob).list_prefix(prefix, received, flat=is_flat)
    literal = [obj for obj in found if obj.url == glob]
    return literal or [obj for obj in found if match(obj.url)]


def _below(prefix: str, found: Sequence[RemoteObject], wanted: Wanted) -> list[RemoteObject]:
    """Return the shards or files among what lies below a prefix."""
    files = [obj for obj in found if not obj.url.endswith("/")]
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
    """Return the shards below a prefix.

    A manifest in JSON Lines or parquet beside tars is no shard, but in a folder of such files alone
    each is one.
    """
    shards = [obj for obj in files if is_shard_or_file(obj.url)]
    if shards or wanted == "either":
        return shards
    return [obj for obj in files if is_shard(obj.url)]


def _listed(pattern: str, found: Sequence[RemoteObject], wanted: Wanted) -> Shards:
    """Return what a listing names.

    Keys that are not valid urls are left out, unless files are wanted: each of those is refused
    when it is requested.
    """
    odd = [obj for obj in found if not is_sound(obj.url)]
    if not odd:
        return Shards.of(map(_ref, found))

    log.warning(
        "keys below the prefix that are not valid urls cannot be fetched",
        url=pattern,
        files=len(odd),
        first=_printable(odd[0].url),
    )
    if wanted in ("files", "entries"):
        return Shards.of(
            ShardRef(_printable(obj.url), obj.version, obj.size_bytes) for obj in found
        )
    left_out = {obj.url for obj in odd}
    return Shards.of(_ref(obj) for obj in found if obj.url not in left_out)


def _printable(url: str) -> str:
    """Return a key as valid text: the names of local files may hold other bytes."""
    return url.encode(errors="backslashreplace").decode()


def _not_empty(pattern: str, shards: Shards, wanted: Wanted) -> Shards:
    """Return the shards. Raises NotFoundError if there are none."""
    if shards:
        return shards
    remedy = "check it for typos"
    if is_glob(pattern):
        remedy += "; in a name, `[` is written `[[]`, `*` is `[*]`, and `?` is `[?]`"
    elif wanted == "samples":
        remedy += f"; a prefix matches only {', '.join(plain_suffixes())}, plain or compressed"
    kind = "shard" if wanted == "samples" else "file"
    raise NotFoundError(f"no {kind} matches", url=pattern, remedy=remedy)


def _ref(obj: RemoteObject) -> ShardRef:
    return ShardRef(checked(obj.url), obj.version, obj.size_bytes)
