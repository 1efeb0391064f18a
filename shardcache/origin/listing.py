"""Expansion of a dataset's patterns, prefixes, index files and urls into shards; globs over urls."""

import asyncio
import os
import re
from collections.abc import MutableMapping, Sequence
from itertools import islice
from math import prod

import structlog
from braceexpand import braceexpand

from shardcache import shardlist
from shardcache.access import WEB, checked, glob_prefix, is_glob, is_sound, join, protocol_of
from shardcache.errors import ConfigError, NotAnIndexError, NotFoundError
from shardcache.origin.base import RemoteObject, read_object
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef, Wanted, local_path
from shardcache.shardlist import MAX_SHARDS
from shardcache.shards import Columns, Shards
from shardcache.transport.workers import Flow, Received, nothing
from shardcache.units import size
from shardcache.url_names import SHARD_SUFFIXES, is_index, is_shard

MAX_INDEX_BYTES = 512 * 1024 * 1024  # an index of a million shards with long urls takes 250 MB

log = structlog.get_logger()

Indexes = MutableMapping[tuple[str, str], Shards]

_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
# NeMo's other spellings of braces: a range in brackets, which no glob means, and `_OP_` and `_CL_`.
_BRACKETED = re.compile(r"\[(-?\d+\.\.-?\d+(?:\.\.-?\d+)?|[A-Za-z]\.\.[A-Za-z])\]")
_WORDED = re.compile(r"_OP_((?:(?!_OP_|_CL_)[^{}])*)_CL_")
# Escaped braces and commas, and what stands for them meanwhile: characters that no url has.
_ESCAPED = {"\\{": "\x00", "\\}": "\x01", "\\,": "\x02"}
_BRACES_REMEDY = r"write {000..099} or {a,b}; a brace in a name is written \{ or \}"
_MAX_DIGITS = 18
# Expansion takes more than linear time in the number of braces, their depth, and the number of words that they list.
_MAX_BRACES = 32
_MAX_LISTED = 10_000


async def expand(
    pattern: str,
    origins: Origins,
    received: Received = nothing,
    indexes: Indexes | None = None,
    wanted: Wanted = "samples",
) -> Shards:
    """Return the shards that a pattern expands to; an index file in `indexes`, by url and version, is not read again.

    Braces are expanded first, without a request; each result is then a glob (`*`, `?`, `[...]`, `**`; sorted by url), a
    prefix that ends in "/" (every shard below it; sorted by url), an index file (.json, wids format; in its own order)
    or a shard's url. A glob that is an object's own url is that object. Sizes and versions are set where a listing
    states them.

    With `wanted`, a file that is no index stands for itself, and a prefix for every file below it; if "either" is
    wanted, only if there is no shard. If "entries" are, the pattern is a folder's own url, whatever its characters, and
    stands for the files and folders that lie directly below it.

    A listed key that is no url, as for its control characters, is left out, and logged. If "files" or "entries" are
    wanted, it is listed as well: whoever fetches it is refused.

    Raises NotFoundError for a pattern without shards, ConfigError for an invalid one, and the origin's errors.
    """
    if wanted == "entries":
        return await _entries(checked(pattern), origins, received)
    found: list[Shards] = []
    for url in await asyncio.to_thread(expand_braces, pattern):
        found.append(await _expand_one(url, origins, received, {} if indexes is None else indexes, wanted))
        _check_number(sum(map(len, found)), pattern)
    return await asyncio.to_thread(Shards.joined, found)


def named_by_braces(pattern: str) -> Shards | None:
    """Return the shards that braces alone determine, None if the origin has to be asked. Blocks."""
    urls = expand_braces(pattern)
    return None if asks_store(pattern) else Shards.of(map(ShardRef, urls))


def asks_store(pattern: str) -> bool:
    """Return whether a pattern needs a request to the origin; otherwise braces alone determine its shards. Blocks."""
    braced = in_braces(pattern)
    if _is_asked_for(braced):
        return True
    if "{" not in braced or braced.endswith(SHARD_SUFFIXES):
        return False
    return any(map(_is_asked_for, expand_braces(pattern)))


def _is_asked_for(url: str) -> bool:
    return url.endswith("/") or is_index(url) or is_glob(url)


def in_braces(pattern: str) -> str:
    """Return a pattern with braces for NeMo's `[0..9]`, `_OP_0..9_CL_` and `_OP_a,b_CL_`."""
    return _WORDED.sub(_braces_of_words, _BRACKETED.sub(r"{\1}", pattern))


def _braces_of_words(found: re.Match[str]) -> str:
    listed = found[1]
    return f"{{{listed}}}" if ".." in listed or "," in listed else found[0]


def _check_number(shards: int, pattern: str) -> None:
    if shards > MAX_SHARDS:
        remedy = "write larger shards, or read the dataset in several parts"
        raise ConfigError(f"it expands to more than {MAX_SHARDS:,} shards", url=pattern, remedy=remedy)


def expand_braces(pattern: str) -> list[str]:
    """Return the urls that a brace pattern expands to, as in bash and in its order.

    Braces after a backslash are characters of the url, and so are those of a local file's own path. Raises ConfigError
    for braces that are unbalanced or do not expand, and for a range beyond `MAX_SHARDS`.
    """
    checked(pattern)
    braced = in_braces(pattern)
    if ("{" not in braced and "}" not in braced) or _is_local_file(pattern):
        return [pattern]
    for escaped, stand_in in _ESCAPED.items():
        braced = braced.replace(escaped, stand_in)
    return [*map(_unescaped, _expanded(braced, pattern))]


def _is_local_file(url: str) -> bool:
    path = local_path(url)
    return path is not None and os.path.isfile(path)  # noqa: PTH113  # False for what is too long for a path


def _unescaped(url: str) -> str:
    for escaped, stand_in in _ESCAPED.items():
        url = url.replace(stand_in, escaped[1])
    return url


def _expanded(braced: str, pattern: str) -> list[str]:
    """Return what unescaped braces expand to; errors name the user's own pattern."""
    if braced.count("{") > _MAX_BRACES:
        raise ConfigError(
            f"the pattern has more than {_MAX_BRACES} braces", url=pattern, remedy="split it into several"
        )
    _check_count(braced, pattern)
    try:
        urls = list(islice(braceexpand(braced, escape=False), MAX_SHARDS + 1))
    except ValueError:
        raise ConfigError("unbalanced braces", url=pattern, remedy=_BRACES_REMEDY) from None
    _check_number(len(urls), pattern)
    if any("{" in url or "}" in url for url in urls):
        raise ConfigError("the braces do not expand", url=pattern, remedy=_BRACES_REMEDY)
    return urls


def _check_count(braced: str, pattern: str) -> None:
    """Raise ConfigError for a pattern that would take minutes to expand, judged by its outermost braces."""
    ranges, lists, depth = _RANGE.findall(braced), [1], 0
    if any(len(number) > _MAX_DIGITS for numbers in ranges for number in numbers):
        raise ConfigError("a number in the pattern is too long", url=pattern)
    for char in braced:
        depth = max(0, depth + (char == "{") - (char == "}"))
        if char == "{" and depth == 1:
            lists.append(1)
        elif char == "," and depth:
            lists[-1] += 1
    counts = [abs(int(stop) - int(start)) // (int(step or 1) or 1) + 1 for start, stop, step in ranges]
    if prod(counts) > MAX_SHARDS or prod(lists) > _MAX_LISTED:
        raise ConfigError("the pattern expands to too many shards", url=pattern, remedy="split it into several")


async def _expand_one(url: str, origins: Origins, received: Received, indexes: Indexes, wanted: Wanted) -> Shards:
    if is_glob(url):
        return _some(url, _listed(url, await _matching(url, origins, received), wanted), wanted)
    if url.endswith("/"):
        found = await origins.origin(url).list_prefix(url, received)
        return _some(url, _listed(url, _below(url, found, wanted), wanted), wanted)
    if is_index(url):
        obj = await origins.origin(url).stat(url)
        if (url, obj.version) in indexes:
            return indexes[url, obj.version]
        try:
            if obj.size_bytes > MAX_INDEX_BYTES:
                raise NotAnIndexError(f"the file is too large for an index ({size(obj.size_bytes)})", url=obj.url)
            data = await read_object(origins.origin(obj.url), obj, Flow(received))
            shards = indexes[url, obj.version] = _some(url, await asyncio.to_thread(parse_index, url, data), wanted)
        except NotAnIndexError:
            if wanted == "samples":
                raise
            return Shards.of([_ref(obj)])
        return shards
    return Shards.of([ShardRef(url)])


async def _entries(folder: str, origins: Origins, received: Received) -> Shards:
    found = await origins.origin(folder).list_prefix(folder, received, flat=True)
    inside = [obj for obj in found if obj.url != folder]
    return _some(folder, _listed(folder, inside, "entries"), "entries")


async def _matching(glob: str, origins: Origins, received: Received) -> list[RemoteObject]:
    """Return the object whose own url this is, else all that the glob matches."""
    match = glob_regex(glob).fullmatch
    prefix = glob_prefix(glob)
    flat = "/" not in glob.removeprefix(prefix) and "**" not in glob
    found = await origins.origin(glob).list_prefix(prefix, received, flat=flat)
    literal = [obj for obj in found if obj.url == glob]
    return literal or [obj for obj in found if match(obj.url)]


def _below(prefix: str, found: Sequence[RemoteObject], wanted: Wanted) -> list[RemoteObject]:
    """Return the shards or files among what lies below a prefix."""
    files = [obj for obj in found if not obj.url.endswith("/")]
    shards = [obj for obj in files if is_shard(obj.url)]
    if wanted == "files" or (wanted == "either" and not shards):
        return files
    if left_out := [obj.url for obj in files if not is_shard(obj.url)]:
        text = "files below the prefix that have no shard's name are left out"
        log.info(text, url=prefix, files=len(left_out), first=left_out[0])
    return shards


def _listed(pattern: str, found: Sequence[RemoteObject], wanted: Wanted) -> Shards:
    """Return what a listing names; of keys that are no urls, only those of files, to be refused one by one."""
    odd = [obj for obj in found if not is_sound(obj.url)]
    if not odd:
        return Shards.of(map(_ref, found))
    text = "keys below the prefix that are no urls cannot be fetched"
    log.warning(text, url=pattern, files=len(odd), first=_written(odd[0].url))
    if wanted in ("files", "entries"):
        return Shards.of(ShardRef(_written(obj.url), obj.version, obj.size_bytes) for obj in found)
    left_out = {obj.url for obj in odd}
    return Shards.of(_ref(obj) for obj in found if obj.url not in left_out)


def _written(url: str) -> str:
    """Return a key as text: local names may hold bytes that are none."""
    return url.encode(errors="backslashreplace").decode()


def _some(pattern: str, shards: Shards, wanted: Wanted) -> Shards:
    if shards:
        return shards
    remedy = "check it for typos"
    if is_glob(pattern):
        remedy += "; in a name, `[` is written `[[]`, `*` is `[*]`, and `?` is `[?]`"
    elif wanted == "samples":
        remedy += f"; a prefix matches only {', '.join(SHARD_SUFFIXES)}"
    raise NotFoundError(f"no {'shard' if wanted == 'samples' else 'file'} matches", url=pattern, remedy=remedy)


def _ref(obj: RemoteObject) -> ShardRef:
    return ShardRef(checked(obj.url), obj.version, obj.size_bytes)


def parse_index(url: str, data: bytes) -> Shards:
    """Parse the index file at `url`, whose format `shardlist` describes.

    Raises NotAnIndexError for any other content.
    """
    try:
        return Shards.of_columns(_resolved(url, *columns) for columns in shardlist.read(data))
    except ValueError as exn:
        raise NotAnIndexError(
            f"not an index of shards ({exn})",
            url=url,
            remedy='create one with `shardcache index`; format: {"shardlist": [{"url": "a.tar", "nsamples": 1000}]}',
        ) from exn


def _resolved(index: str, urls: Sequence[str], etags: Sequence[str | None], *counts: Sequence[int | None]) -> Columns:
    urls = [checked(join(index, url)) for url in urls]
    # Indexes have ETags with or without quotes; an origin's versions have none, except over plain HTTP.
    versions = [
        each.strip('"') if each and '"' in each and protocol_of(url) not in WEB else each
        for url, each in zip(urls, etags, strict=True)
    ]
    return urls, versions, *counts


# In brackets, a "]" that comes first, or first after "!", is one of the characters.
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[(?>!?)(?>\]?)[^\]/]*\]|.", re.DOTALL)
_STARS = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
_LAZY = {"*": "[^/]*?", "**": ".*?", "**/": "(?:.*?/)??"}

# Stars outside atomic groups; each multiplies the work by the length of the url.
_MAX_BACKTRACKING = 3
_MAX_GLOB_CHARS = 2048  # no listed url is that long, and a longer glob takes long to parse


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob.

    As in a shell, `*`, `?` and `[...]` stay within one folder, `**` crosses folders and `**/` may match no folder.

    A plain translation backtracks: with seven stars in a pattern, one url takes minutes. Where a star is followed by
    another that matches everything it does, the first match of the text between them is as good as any later one: an
    atomic group says so, as in the standard library's fnmatch.

    Raises ConfigError for a bracket range that runs backwards, and for a glob that would take too long.
    """
    if len(pattern) > _MAX_GLOB_CHARS:
        raise ConfigError(f"the glob has more than {_MAX_GLOB_CHARS} characters", url=pattern[:200])
    tokens = _TOKEN.findall(pattern)
    stars = [at for at, token in enumerate(tokens) if token in _STARS]
    atomic = {at: end for at in stars if (end := _settled_at(tokens, stars, at)) is not None}
    if len(stars) - len(atomic) > _MAX_BACKTRACKING:
        raise ConfigError("the glob has too many `**`", url=pattern[:200], remedy="split it into several")
    try:
        return re.compile("".join(_translated(tokens, atomic)), re.DOTALL)
    except re.error as exn:
        raise ConfigError(f"invalid glob: {exn}", url=pattern[:200]) from None


def _settled_at(tokens: Sequence[str], stars: Sequence[int], at: int) -> int | None:
    """Return the later star up to which the first match is as good as any; None if there is none."""
    later = [star for star in stars if star > at]
    if tokens[at] != "*":
        later = [star for star in later if tokens[star] != "*"]
    if not later:
        return None
    absorbs_all = tokens[later[0]] != "**/" or (tokens[at] != "*" and tokens[later[0] - 1] == "/")
    return later[0] if absorbs_all else None


def _translated(tokens: Sequence[str], atomic: dict[int, int]) -> list[str]:
    parts = [_LAZY[token] if at in atomic else _translate(token) for at, token in enumerate(tokens)]
    for at, end in reversed(atomic.items()):  # a group that ends where the next begins closes before it
        parts[at] = "(?>" + parts[at]
        parts[end] = ")" + parts[end]
    return parts


def _translate(token: str) -> str:
    if token in _STARS:
        return _STARS[token]
    if token == "?":
        return "[^/]"
    if len(token) == 1:
        return re.escape(token)
    chars = re.escape(token[1:-1].removeprefix("!")).replace(r"\-", "-")
    return f"[^/{chars}]" if token.startswith("[!") else f"[{chars}]"
