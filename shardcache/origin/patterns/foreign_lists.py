"""Lists of shards that other programs write: their names, and numbers of samples where stated.

==================  =====================================  =========================================
file                written by                             content
==================  =====================================  =========================================
`sizes.json`        open_clip's users, DataComp            `{"00000.tar": 9987, …}`
`_info.json`        timm, pixparse                         `{"splits": {"train": {"filenames": […],
                                                           "shard_lengths": […], …}, …}}`
`.info.json`        Megatron Energon, in `.nv-meta`        `{"shard_counts": {"a.tar": 1000, …}, …}`
`split.json`        Megatron Energon, in `.nv-meta`        `{"split_parts": {"train": ["{a,b}.tar"],
                                                           …}, "exclude": […]}`
`NAME.list`         WeNet                                  a url or path in each line
==================  =====================================  =========================================

Energon's may be YAML instead. Which of these a file is follows from its content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.access.urls import join
from shardcache.errors import ConfigError, MissingPackageError, NotAnIndexError
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.list_content import lines_of, parsed_json
from shardcache.shared.urls.url_names import is_shard, is_yaml

# A list of a million shards has 30 MB; parsed, it takes some times as much memory.
_MAX_BYTES = 64 * 1024 * 1024
_MAX_COUNT = 2**63
_ROOT = "../list"  # beside which the names in Energon's lists are
_ENERGON_COUNTS = (".info.json", ".info.yaml")


@dataclass(frozen=True, slots=True)
class NamedShards:
    """Shards of a list.

    Attributes:
        urls: of the shards.
        counts: of the samples of each; None where the list states none.
        counts_in: names of the lists that may state the counts, if they are others.
    """

    urls: Sequence[str]
    counts: Sequence[int | None]
    counts_in: tuple[str, ...] = ()

    def counted_by(self, other: "NamedShards") -> "NamedShards":
        """Return these shards with the counts that another list states."""
        counts = dict(zip(other.urls, other.counts, strict=True))
        return NamedShards(self.urls, [counts.get(url) for url in self.urls])


def parse(url: str, data: bytes, split: str | None) -> NamedShards | None:
    """Return the shards of a list that another program has written; None for anything else.

    Args:
        url: of the list.
        data: its content.
        split: the name of the one of its splits that is wanted.

    Raises NotAnIndexError for a list that makes no sense, ConfigError for a split that it has not,
    MissingPackageError for YAML where PyYAML is not installed.
    """
    if len(data) > _MAX_BYTES:
        return None
    content = _content(url, data)
    try:
        match content:
            case {"splits": {**splits}}:
                return _of_timm(url, _chosen(url, splits, split))
            case {"split_parts": {**parts}}:
                return _of_energon(url, _chosen(url, parts, split), content.get("exclude") or ())
            case {"shard_counts": {**counts}}:
                found = _counted(join(url, _ROOT), [*counts], [*counts.values()])
            case [*names] if names and all(map(_is_shards_name, names)):
                found = _counted(url, names, [None] * len(names))
            case {**counts} if counts and all(map(_is_shards_name, counts)):
                found = _counted(url, [*counts], [*counts.values()])
            case _:
                return None
    except ValueError as exn:
        raise NotAnIndexError(f"not a list of shards ({exn})", url=url) from exn
    if split is not None:
        raise ConfigError(f"the list has no splits, so none called {split!r}", url=url)
    return found


def _content(url: str, data: bytes) -> Any:
    """Return the content of a file; of a text that is not JSON, its lines."""
    if is_yaml(url):
        return _yaml(url, data)
    try:
        text = data.decode("utf-8-sig")
    except ValueError:
        return None
    try:
        return parsed_json(data)
    except ValueError:
        return lines_of(text)


def _yaml(url: str, data: bytes) -> Any:
    try:
        import yaml
    except ImportError as exn:
        raise MissingPackageError(
            "the list is YAML, which needs the Python package pyyaml where the daemon runs",
            url=url,
            remedy="pip install 'shardcache[yaml]'; or write the list as JSON",
        ) from exn
    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as exn:
        raise NotAnIndexError(f"not a list of shards ({exn})", url=url) from exn


def _is_shards_name(name: object) -> bool:
    return isinstance(name, str) and is_shard(name)


def _chosen(url: str, splits: Mapping[Any, Any], split: str | None) -> Any:
    """Return the split of a name, or the only one."""
    if split in splits:
        return splits[split]
    if split is None and len(splits) == 1:
        (only,) = splits.values()
        return only
    names = ", ".join(map(str, splits)) or "none"
    problem = "several splits" if split is None else f"no split {split!r}"
    example = next(iter(splits), "train")
    raise ConfigError(
        f"the list has {problem}; it has: {names}",
        url=url,
        remedy=f"append one to the url: {url}#{example}",
    )


def _of_timm(url: str, split: Any) -> NamedShards:
    match split:
        case {"filenames": [*names], "shard_lengths": [*lengths]}:
            return _counted(url, names, lengths)
        case {"filenames": [*names]}:
            return _counted(url, names, [None] * len(names))
    raise ValueError('a split has no "filenames"')


def _of_energon(url: str, patterns: Any, excluded: Any) -> NamedShards:
    root = join(url, _ROOT)
    left_out = set(_expanded(root, excluded))
    sample = next((each for each in left_out if not is_shard(each)), None)
    if sample is not None:
        raise ConfigError(
            f"the split leaves out single samples, such as {sample}, which is not supported",
            url=url,
            remedy='choose samples with ShardDataset(…).select(), and omit them from "exclude"',
        )
    urls = [each for each in _expanded(root, patterns) if each not in left_out]
    return NamedShards(urls, [None] * len(urls), _ENERGON_COUNTS)


def _expanded(folder: str, patterns: Any) -> list[str]:
    if not isinstance(patterns, list | tuple):
        raise ValueError("a split is not a list")  # noqa: TRY004  # as for any other content
    return [url for pattern in patterns for url in expand_braces(join(folder, str(pattern)))]


def _counted(base: str, names: Sequence[Any], counts: Sequence[Any]) -> NamedShards:
    """Return the shards of names relative to `base`, with their counts. Raises ValueError."""
    if len(names) != len(counts):
        raise ValueError(f"it has {len(names)} names, and {len(counts)} numbers of samples")
    for name, count in zip(names, counts, strict=True):
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")  # noqa: TRY004  # as for any other content
        if count is not None and not _is_count(count):
            raise ValueError(f"the number of samples of {name} is {count!r}")
    return NamedShards([join(base, name) for name in names], counts)


def _is_count(count: object) -> bool:
    return type(count) is int and 0 <= count < _MAX_COUNT
