"""A drop-in replacement for `webdataset.WebDataset`, with shards from the node's daemon.

    from shardcache_client.webdataset import WebDataset

in place of

    from webdataset import WebDataset

Needs the package webdataset, which shardcache itself does not depend on. A webdataset pipeline is a
list of stages, each a function from an iterator over samples to another. Here the first stage, the
source, is a ShardDataset; all later stages are webdataset's own. The state of a pipeline is the
position of its source.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.urls.local_urls import absolute_urls, local_path
from shardcache_client.arguments.other_words import OTHER_WORDS
from shardcache_client.arguments.values import (
    FUNCTION,
    TEXT,
    URLS,
    Accepts,
    checked,
    instance,
)
from shardcache_client.dataset import ShardDataset
from shardcache_client.handlers import Handler, reraise
from shardcache_client.loading.torch_runtime import TorchRuntime
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.parts.dataset_arguments import ARGUMENTS
from shardcache_client.ranks.group import Epochs, RankGroup
from shardcache_client.samples.slicing import Sample

try:
    import webdataset as wds

    # The name is bound to the original class here. It stays so if a program later patches the
    # drop-in over `webdataset.WebDataset`.
    from webdataset import WebDataset as OriginalWebDataset
    from webdataset.shardlists import envsubst
except ImportError as exn:
    raise ImportError(
        "shardcache_client.webdataset needs webdataset: pip install webdataset", name=exn.name
    ) from exn

log = logging.getLogger("shardcache")

Splitter = Callable[..., Any] | None

_RESERVED_NAMES = ("__key__", "__url__", "__local_path__")  # keys of a sample that are not members

_ITEM_BY_ITEM = (
    "associate",
    "decode",
    "extract_keys",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "rename",
    "rename_keys",
    "rsample",
    "select",
    "slice",
    "to_tuple",
    "xdecode",
)
"""webdataset's stages that yield at most one item for each item that they take, before the next.

Only with these stages does the source's position tell which items were yielded.
"""

# webdataset's splitters that are replaced: ShardDataset divides the samples evenly among ranks. The
# first is webdataset's default, which permits only a single node.
_NODE_SPLITTERS = (wds.single_node_only, wds.split_by_node)

# Arguments of ShardDataset that have other names here, with the remedy for each.
_REMEDIES = {
    "shuffle": "write shardshuffle=True",
    "on_error": "write handler=...",
}

# Rules for ShardDataset's further arguments, by name. These arguments are passed on as `options`.
_OPTIONS = {
    name: rule for name, rule in ARGUMENTS.items() if name != "urls" and name not in _REMEDIES
}


def _urls_or_mixture(value: Any) -> Any:
    """Check and convert `urls`, as `URLS` does. Raises TypeError or ValueError."""
    if isinstance(value, Mapping):  # a mixture, which `_patterns` refuses with a better remedy
        return value
    return URLS.converted(value)


class WebDataset(OriginalWebDataset):  # type: ignore[misc]
    """A webdataset pipeline whose first stage is a ShardDataset, its attribute `source`.

    Stages that process samples are webdataset's own code: `.decode()`, `.to_tuple()`, `.map()`,
    `.batched()`, `.shuffle()`, `.with_epoch()`. Stages that process shards are replaced by the
    node's daemon and ShardDataset.

    Args:
        urls: as for webdataset (braces, "::", `${VAR}` from $WDS_VAR, local paths and `file:` urls,
            lists) or for ShardDataset. `pipe:` is refused. Samples of local shards have
            `__local_path__`.
        handler: called for shards and samples that cannot be read. Stages have their own handlers.
        mode, resampled: mode="resampled" or resampled=True yields samples endlessly, for
            `.with_epoch()`: in rounds of the whole dataset, each in a different order, whereas
            webdataset draws shards with replacement.
        shardshuffle: a false value keeps the shards in order; any other value permutes all of them,
            differently in each epoch. The order depends on `seed` and epoch alone: it is the same
            on all ranks and in every run.
        detshuffle: no effect; the shuffle is always deterministic.
        nodesplitter: `split_by_node` and the default divide samples, not shards, evenly among all
            ranks. With None, every rank reads everything, in the same order; but an endless stream
            is divided all the same.
        workersplitter: only the default is accepted; samples are also divided among workers.
        select_files: called for each member of a sample with "key.extension", the extension in
            lower case.
        seed: default: $WDS_SEED, else 0.
        cache_dir, cache_size, url_to_name: no effect; the daemon does the caching.
        empty_check: no effect; a dataset without samples is refused, while a worker without samples
            is accepted.
        repeat, verbose: no effect, as in webdataset.
        options: further arguments of ShardDataset, such as `batch_size`, `even` or `socket`.
            `shuffle_window` is 0 by default, so that `.shuffle()` mixes as in webdataset. For exact
            resuming, set `shuffle_window` in place of `.shuffle()`, and let the DataLoader batch in
            place of `.batched()`. These two stages hold samples back, and a state counts the held
            samples as read: they are skipped when it is loaded.

    Raises:
        ConfigError: an argument is not supported over shardcache, such as `rename_files` or a yaml
            file.
        ShardcacheError: as ShardDataset.
    """

    @checked(
        OTHER_WORDS | _REMEDIES,  # remedies for unknown arguments
        _OPTIONS.keys(),  # names that `**options` may have
        urls=Accepts(URLS.description, _urls_or_mixture),
        handler=ARGUMENTS["on_error"],
        mode=TEXT.or_none(),
        shardshuffle=instance("True, False, or a number of shards", bool, int).or_none(),
        cache_size=instance("a number of bytes", int, float),
        select_files=FUNCTION.or_none(),
        **_OPTIONS,
    )
    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        handler: Handler = reraise,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: int = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Callable[[str], str] | None = None,
        detshuffle: bool = False,
        nodesplitter: Splitter = wds.single_node_only,
        workersplitter: Splitter = wds.split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        is_endless = resampled or mode == "resampled"
        _check_unsupported(mode, rename_files)
        if cache_dir is not None or cache_size > 0:
            log.warning(
                "WebDataset: cache_dir and cache_size are ignored; the daemon does the caching"
            )
        division = _division(nodesplitter, workersplitter, is_endless=is_endless)
        options = {"shuffle_window": 0} | division | options
        patterns = _patterns(urls)
        if seed is None:
            seed = int(os.environ.get("WDS_SEED", "0"))
        dataset_class = _Endless if is_endless else ShardDataset
        self.source = dataset_class(
            patterns,
            shuffle=bool(shardshuffle) or is_endless,
            seed=seed,
            on_error=handler,
            **options,
        )
        self._source_stage = _SourceStage(self.source)
        stages: list[Any] = [self._source_stage]
        if any(local_path(pattern) for pattern in patterns):
            stages.append(_add_local_paths)
        if select_files is not None:
            stages.append(functools.partial(_keep_members, keep=select_files))
        # webdataset's own constructor is skipped: it builds the stages that the source replaces.
        super(OriginalWebDataset, self).__init__(*stages)
        if is_endless:
            self.repeat()

    def __iter__(self) -> Iterator[Any]:
        self._source_stage.begin()
        items: Iterator[Any] = super().__iter__()
        return items

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads; see ShardDataset."""
        self.source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the source.

        Samples that `.shuffle()` or `.batched()` holds back count as read.

        Raises ConfigError for a pipeline with a stage that may yield several items per sample: the
        position of the source does not tell how many of these items were taken.
        """
        self._check_stages()
        return self.source.state_dict()

    def _check_stages(self) -> None:
        """Raise ConfigError if a stage may yield several items for a position of the source."""
        for stage in self.pipeline:
            is_source = isinstance(stage, _SourceStage)
            # Resuming skips samples that a stage holds back; `load_state_dict` warns of this.
            can_resume = is_source or _is_item_by_item(stage) or _holds_samples(stage)
            if not can_resume:
                name = _name_of(stage)
                raise _unsupported(
                    f"a state with the stage {name}, which may yield several items per sample",
                    "write a stage that yields one item per sample as .map() or .select(); split "
                    "samples after the loader, or let .map() return all items of a sample together",
                )

    def load_state_dict(self, state: object) -> None:
        """Resume where the state was taken; see ShardDataset.

        Raises ConfigError as `state_dict` does.
        """
        self._check_stages()
        if any(_holds_samples(stage) for stage in self.pipeline):
            log.warning(
                "WebDataset: samples that .shuffle() or .batched() held when the state was saved "
                "are skipped; to skip none, use shuffle_window instead of .shuffle(), and let the "
                "DataLoader batch"
            )
        self.source.load_state_dict(state)


class _EndlessRuntime(TorchRuntime):
    """The runtime of an endless stream: what its dataset knows about the program that reads it.

    The ranks of other datasets agree on the epoch to read next. Here an epoch is one round of the
    stream, and each rank begins its next round whenever it has read the last one.
    """

    def epochs(self, group: RankGroup, deal_options: DealOptions) -> Epochs:
        """Return the epochs of this rank alone; neither argument matters."""
        return Epochs()


class _Endless(ShardDataset[Any]):
    """The dataset of an endless stream: each of its epochs is one round of the stream."""

    _runtime = _EndlessRuntime()


class _SourceStage:
    """The first stage: yields the samples of the source. All derived pipelines share this object.

    webdataset calls the first stage when the first sample is taken. The source's state may be
    requested before that, so the pass over the source is begun by `begin` at the start of an
    iteration.
    """

    def __init__(self, source: ShardDataset) -> None:
        self._source = source
        self._begun: Iterator[Sample] | None = None  # a pass that has begun and is not read yet

    def begin(self) -> None:
        """Begin the next pass, to be read later."""
        self._begun = iter(self._source)

    def __call__(self) -> Iterator[Sample]:
        begun = self._begun
        self._begun = None
        return iter(self._source) if begun is None else begun

    def __reduce__(self) -> tuple[Any, ...]:
        # A pass that has begun stays in this process: an iterator cannot be pickled.
        return _SourceStage, (self._source,)


def _unsupported(what: str, remedy: str) -> ConfigError:
    """Return the error for an argument or a call that the drop-in does not have."""
    return ConfigError(f"WebDataset over shardcache does not support {what}", remedy=remedy)


def _check_unsupported(mode: str | None, rename_files: object) -> None:
    """Raise ConfigError for arguments of webdataset's that are not supported."""
    if mode not in (None, "resampled"):
        # webdataset's other modes are for folders of shards.
        raise _unsupported(f"mode={mode!r}", "omit it; urls that end in / need no mode")
    if rename_files is not None:
        raise _unsupported(
            "rename_files",
            "rename with the stages .rename(), .rename_keys() or .map(); samples are grouped when "
            "a shard is indexed",
        )


def _patterns(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Convert urls as webdataset takes them to urls as ShardDataset takes them."""
    is_yaml = isinstance(urls, str) and urls.endswith((".yaml", ".yml"))
    if is_yaml or isinstance(urls, Mapping):
        raise _unsupported(
            "a mixture in yaml",
            "make a WebDataset of each part and mix them with webdataset.RandomMix",
        )
    if isinstance(urls, str):
        urls = [envsubst(url) for url in urls.split("::")]
    patterns = absolute_urls(urls)
    for pattern in patterns:
        if pattern.startswith("pipe:"):
            raise _unsupported(
                repr(pattern),
                "pass the url that the command reads; the daemon fetches it itself",
            )
    return patterns


def _division(
    nodesplitter: Splitter, workersplitter: Splitter, *, is_endless: bool
) -> dict[str, Any]:
    """Return the arguments of ShardDataset that divide samples as the splitters divide shards.

    Args:
        is_endless: True for a stream without epochs.

    Raises ConfigError for splitters that are not supported.
    """
    if nodesplitter is not None and nodesplitter not in _NODE_SPLITTERS:
        raise _unsupported(
            "a nodesplitter of your own",
            "omit it: ranks get equal shares; or pass each rank its own urls, with "
            "nodesplitter=None",
        )
    # With None in place of a splitter, each rank or worker reads all shards. In an endless stream,
    # they share the shards even then: the stream has no end in either case, and the job as a whole
    # gets each sample equally often.
    is_default = workersplitter is wds.split_by_worker
    shares_anyway = is_endless and not workersplitter
    if not (is_default or shares_anyway):
        raise _unsupported(
            "a workersplitter of your own",
            "omit it: workers get equal shares, divided by samples, however few shards there are",
        )
    if nodesplitter is None and not is_endless:
        return {"rank": 0, "world_size": 1}  # each rank reads as if it were the only one
    return {}


def _add_local_paths(samples: Iterable[Any]) -> Iterator[Any]:
    """Add `__local_path__` to the samples of local shards, as webdataset does."""
    for sample in samples:
        # A sample may be anything that a function given as `decode` has returned.
        if isinstance(sample, dict):
            path = local_path(sample.get("__url__", ""))
            if path:
                sample["__local_path__"] = path
        yield sample


def _keep_members(samples: Iterable[Sample], *, keep: Callable[[str], bool]) -> Iterator[Sample]:
    """Yield the samples with only the members to keep; drop samples that have none."""
    for sample in samples:
        reserved = {name: sample[name] for name in _RESERVED_NAMES if name in sample}
        members = {
            extension: value
            for extension, value in sample.items()
            if extension not in reserved and keep(f"{sample['__key__']}.{extension}")
        }
        if members:
            yield reserved | members


def _is_item_by_item(stage: Any) -> bool:
    """Return whether a stage yields at most one item for each item that it takes.

    True for the stages of this module, and for the stages of webdataset in `_ITEM_BY_ITEM`.
    """
    if isinstance(stage, functools.partial):  # `_keep_members` is one; a user's may be, too
        function = stage.func
    else:
        function = getattr(stage, "f", stage)  # a stage of webdataset has its function as `f`
    if function in (_add_local_paths, _keep_members):
        return True
    known_stages: list[Any] = [getattr(wds.filters, name, None) for name in _ITEM_BY_ITEM]
    known_functions = [known.f for known in known_stages if hasattr(known, "f")]
    return function in known_functions


def _name_of(stage: Any) -> str:
    """Return the name of a stage, for messages."""
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__name__", type(stage).__name__)).lstrip("_")


def _holds_samples(stage: Any) -> bool:
    """Return whether a stage holds samples back: it shuffles, or makes batches."""
    if isinstance(stage, wds.detshuffle):
        return True
    return getattr(stage, "f", None) in (wds.shuffle.f, wds.batched.f)
