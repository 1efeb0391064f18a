"""Lists of shards that other programs write: the shards' urls, and numbers of samples if stated.

`expansion` calls `parse` for an index file that `index_files` cannot parse.

- A count is a shard's number of samples.
- A split is a named part of a dataset, such as `train`.
- An index file is YAML if its name says so, and otherwise JSON, or lines of text.

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

Energon's files may be YAML instead of JSON. Which program has written a list is determined by its
content, not by its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.access.urls import join
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.list_content import lines_of, parsed_json
from shardcache.shared.exceptions import ConfigError, MissingPackageError, NotAnIndexError
from shardcache.shared.urls.url_names import is_shard, is_yaml

# A list of a million shards has 30 MB; parsed, it takes several times as much memory.
_MAX_BYTES = 64 * 1024 * 1024
_MAX_COUNT = 2**63
# Names in Energon's lists are relative to the folder that contains `.nv-meta`. `join` resolves
# names relative to a file, so this stands for any file in that folder.
_ENERGON_ROOT = "../list"
_ENERGON_COUNTS = (".info.json", ".info.yaml")


@dataclass(frozen=True, slots=True)
class NamedShards:
    """Shards of a list.

    Attributes:
        urls: urls of the shards.
        counts: each shard's number of samples; None where the list does not state it.
        counts_in: names of other lists, relative to this one, that may state the counts.
    """

    urls: Sequence[str]
    counts: Sequence[int | None]
    counts_in: tuple[str, ...] = ()

    def counted_by(self, other: "NamedShards") -> "NamedShards":
        """Return these shards with the counts that another list states."""
        count_by_url = dict(zip(other.urls, other.counts, strict=True))
        counts = [count_by_url.get(url) for url in self.urls]
        return NamedShards(self.urls, counts)


def parse(url: str, data: bytes, split: str | None) -> NamedShards | None:
    """Return the shards of a list that another program has written; None for anything else.

    Args:
        url: the list's url.
        data: the list's content.
        split: name of the split to return; None for a list with only one split or without splits.

    Raises NotAnIndexError for a list that is malformed, ConfigError for a split that the list does
    not have, and MissingPackageError for a YAML list if PyYAML is not installed.
    """
    if len(data) > _MAX_BYTES:
        return None
    content = _content(url, data)
    try:
        match content:
            case {"splits": {**splits}}:  # timm's
                return _of_timm(url, _chosen_split(url, splits, split))
            case {"split_parts": {**splits}}:  # Energon's shards of each split
                patterns = _chosen_split(url, splits, split)
                return _of_energon(url, patterns, content.get("exclude") or ())
            case {"shard_counts": {**counts}}:  # Energon's counts
                root = join(url, _ENERGON_ROOT)
                shards = _counted(root, [*counts], [*counts.values()])
            case [*names] if names and all(map(_names_a_shard, names)):  # WeNet's
                shards = _counted(url, names, [None] * len(names))
            case {**counts} if counts and all(map(_names_a_shard, counts)):  # a sizes.json
                shards = _counted(url, [*counts], [*counts.values()])
            case _:
                return None
    except ValueError as exn:
        raise NotAnIndexError(f"not a list of shards ({exn})", url=url) from exn
    if split is not None:
        raise ConfigError(f"the list has no splits, so none called {split!r}", url=url)
    return shards


def _content(url: str, data: bytes) -> Any:
    """Return the content of a file: parsed YAML or JSON, or else the lines of its text.

    Returns None for a file that is neither YAML nor UTF-8. Raises the errors of `_yaml`.
    """
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
    """Return the content of a YAML file. Raises MissingPackageError, NotAnIndexError."""
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


def _names_a_shard(name: object) -> bool:
    """Return whether a value of a list is a text that ends like a shard's name."""
    return isinstance(name, str) and is_shard(name)


def _chosen_split(url: str, splits: Mapping[Any, Any], split: str | None) -> Any:
    """Return the content of the split that the user chose.

    Args:
        splits: content of each split of the list, by name.
        split: name of a split; None for the only split of the list.

    Raises ConfigError if there is no such split, or if there are several and `split` is None.
    """
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
    """Return the shards of a split in timm's `_info.json`. Raises ValueError."""
    match split:
        case {"filenames": [*names], "shard_lengths": [*lengths]}:
            return _counted(url, names, lengths)
        case {"filenames": [*names]}:
            return _counted(url, names, [None] * len(names))
    raise ValueError('a split has no "filenames"')


def _of_energon(url: str, patterns: Any, excluded: Any) -> NamedShards:
    """Return the shards of a split in Energon's `split.json`, without the excluded shards.

    Raises ConfigError if the split excludes single samples, and ValueError.

    Args:
        patterns: patterns of the split's shards, as the file lists them.
        excluded: patterns of the excluded shards.
    """
    root = join(url, _ENERGON_ROOT)
    excluded_urls = set(_expanded(root, excluded))
    # Energon may also exclude a single sample, by a name that continues after the shard's.
    sample_url = next((url for url in excluded_urls if not is_shard(url)), None)
    if sample_url is not None:
        raise ConfigError(
            f"the split leaves out single samples, such as {sample_url}, which is not supported",
            url=url,
            remedy='choose samples with ShardDataset(…).select(), and omit them from "exclude"',
        )
    urls = [shard for shard in _expanded(root, patterns) if shard not in excluded_urls]
    return NamedShards(urls, [None] * len(urls), _ENERGON_COUNTS)


def _expanded(base: str, patterns: Any) -> list[str]:
    """Return the urls that patterns relative to `base` expand to. Raises ValueError."""
    if not isinstance(patterns, list | tuple):
        raise ValueError("a split is not a list")  # noqa: TRY004  # as for any other content
    urls: list[str] = []
    for pattern in patterns:
        urls += expand_braces(join(base, str(pattern)))
    return urls


def _counted(base: str, names: Sequence[Any], counts: Sequence[Any]) -> NamedShards:
    """Return shards with their counts. Raises ValueError for a malformed name or count.

    Args:
        base: url of the file to which the names are relative.
        names: names of the shards.
        counts: each shard's number of samples; None for a shard without one.
    """
    if len(names) != len(counts):
        raise ValueError(f"it has {len(names)} names, and {len(counts)} numbers of samples")
    for name, count in zip(names, counts, strict=True):
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")  # noqa: TRY004  # as for any other content
        if count is not None and not _is_count(count):
            raise ValueError(f"the number of samples of {name} is {count!r}")
    return NamedShards([join(base, name) for name in names], counts)


def _is_count(count: object) -> bool:
    """Return whether a value of a list is a possible number of samples."""
    # `isinstance` would accept True and False as well.
    return type(count) is int and 0 <= count < _MAX_COUNT
