"""A drop-in for `webdataset.WebDataset`: its arguments, its stages by its own code, its shards from this node's daemon.

    from shardcache_client.webdataset import WebDataset  # in place of: from webdataset import WebDataset

Needs the package webdataset, which shardcache itself does not depend on.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardcache.errors import ConfigError
from shardcache.protocol import from_here, local_path
from shardcache_client.dataset import ShardDataset
from shardcache_client.handlers import Handler, reraise
from shardcache_client.reading.cutting import Sample

try:
    import webdataset as wds
    from webdataset import WebDataset as Theirs  # under a name that stays, where the drop-in takes its place
    from webdataset.shardlists import envsubst
except ImportError as exn:
    raise ImportError("shardcache_client.webdataset needs webdataset: pip install webdataset", name=exn.name) from exn

log = logging.getLogger("shardcache")

Splitter = Callable[..., Any] | None

_NAMES = ("__key__", "__url__", "__local_path__")  # what a sample has beside its members
_ITEM_BY_ITEM = (
    *("associate", "decode", "extract_keys", "info", "log_keys", "map", "map_dict", "map_tuple", "rename"),
    *("rename_keys", "rsample", "select", "slice", "to_tuple", "xdecode"),
)
"""Stages of webdataset that give at most one item for each that they take, before they take the next."""

_OURS = (wds.single_node_only, wds.split_by_node)  # what they do to shards, ShardDataset does to samples


class WebDataset(Theirs):  # type: ignore[misc]
    """A pipeline of webdataset whose first stage is a ShardDataset, the attribute `source`.

    All that webdataset does to samples is webdataset's own code: `.decode()`, `.to_tuple()`, `.map()`, `.batched()`,
    `.shuffle()`, `.with_epoch()`. What it does to shards, this node's daemon and ShardDataset do in its place.

    Args:
        urls: as webdataset takes them (braces, "::", `${VAR}` from $WDS_VAR, paths and `file:` urls of this node,
            lists), or as ShardDataset does. `pipe:` is refused. Samples of local shards have `__local_path__`.
        handler: asked about shards and samples that cannot be read. Stages have handlers of their own.
        mode, resampled: "resampled" gives samples without end, for `.with_epoch()`: in rounds of all of them, each in
            an order of its own, where webdataset draws shards with replacement.
        shardshuffle: false leaves the shards in order; anything else permutes them all, in each epoch anew, by `seed`
            alone: the same on all ranks and in every run, as `detshuffle` means it.
        nodesplitter: `split_by_node` and the default deal samples, not shards, to all ranks alike. None lets every rank
            read everything, in the same order.
        workersplitter: the default; samples are dealt to the workers, too.
        select_files: asked about each member of a sample as "key.extension", the extension in lower case.
        seed: default: $WDS_SEED, else 0.
        cache_dir, cache_size, url_to_name: without effect; the cache is the daemon's.
        empty_check: without effect; a dataset without any sample is refused, a worker without any is not.
        repeat, verbose: without effect, as in webdataset.
        options: further arguments of ShardDataset, such as `batch_size`, `even` or `socket`. `shuffle_window` is 0
            here, for `.shuffle()` to mix what webdataset would. To resume exactly, give it in place of that stage, and
            let the DataLoader batch: `.batched()` takes a sample more than it gives.

    Raises:
        ConfigError: an argument asks for what cannot be had this way; `rename_files` is one, as are yaml files.
        ShardcacheError: what ShardDataset raises.
    """

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
        endless = resampled or mode == "resampled"
        _refuse(mode not in (None, "resampled"), f"mode={mode!r}", "leave it out; urls that end in / need none")
        _refuse(
            rename_files is not None,
            "rename_files",
            "rename by the stages .rename(), .rename_keys() or .map(); samples are grouped when a shard is indexed",
        )
        if cache_dir is not None or cache_size > 0:
            log.warning("WebDataset: cache_dir and cache_size are left aside; the cache is the daemon's")
        options = {"shuffle_window": 0} | _deal(nodesplitter, workersplitter, endless) | options
        patterns = _patterns(urls)
        self.source = ShardDataset(
            patterns,
            shuffle=bool(shardshuffle) or endless,
            seed=int(os.environ.get("WDS_SEED", "0")) if seed is None else seed,
            on_error=handler,
            **options,
        )
        # Not webdataset's own __init__: that builds the stages which the source replaces.
        self._begin = _Begin(self.source)
        super(Theirs, self).__init__(
            self._begin,
            _locate if any(local_path(pattern) for pattern in patterns) else None,
            None if select_files is None else functools.partial(_select, keep=select_files),
        )
        if endless:
            self.repeat()

    def __iter__(self) -> Iterator[Any]:
        self._begin.now()
        return iter(super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads; see ShardDataset."""
        self.source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the source is. Samples that `.shuffle()` or `.batched()` holds back count as read.

        Raises ConfigError for a pipeline with a stage that may give several items of one sample.
        """
        self._check_stages()
        return self.source.state_dict()

    def _check_stages(self) -> None:
        """Raise ConfigError where the source's place does not tell how many items the last stage has given."""
        for stage in self.pipeline:
            _refuse(
                not (isinstance(stage, _Begin) or _is_item_by_item(stage) or _holds_samples(stage)),
                f"a state behind the stage {_named(stage)}, which may give several items of one sample,",
                "write a stage that gives one item for each sample as .map() or .select(); split samples behind the "
                "loader, or let .map() return all items of a sample together",
            )

    def load_state_dict(self, state: object) -> None:
        """Go on where the state was taken; see ShardDataset. Raises ConfigError as `state_dict` does."""
        self._check_stages()
        if any(_holds_samples(stage) for stage in self.pipeline):
            log.warning(
                "WebDataset: samples that .shuffle() or .batched() held when the state was saved are left out; "
                "with shuffle_window in place of the one, and the DataLoader's batches, none are"
            )
        self.source.load_state_dict(state)


class _Begin:
    """The first stage: begins a pass over the source, shared by all pipelines that grew out of one.

    webdataset begins with the first sample, and the source's state may be asked for before that.
    """

    def __init__(self, source: ShardDataset) -> None:
        self._source = source
        self._begun: list[Iterator[Sample]] = []

    def now(self) -> None:
        """Begin the next pass, to be read later."""
        self._begun = [iter(self._source)]

    def __call__(self) -> Iterator[Sample]:
        return self._begun.pop() if self._begun else iter(self._source)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Begin, (self._source,)


def _refuse(condition: bool, what: str, remedy: str) -> None:
    if condition:
        raise ConfigError(f"WebDataset cannot do {what} over shardcache", remedy=remedy)


def _patterns(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return what ShardDataset takes, for what webdataset takes."""
    _refuse(
        isinstance(urls, dict) or (isinstance(urls, str) and urls.endswith((".yaml", ".yml"))),
        "a mixture written in yaml",
        "make a WebDataset of each part and mix them by webdataset.RandomMix",
    )
    if isinstance(urls, str):
        urls = [envsubst(url) for url in urls.split("::")]
    return [_pattern(url) for url in ([urls] if isinstance(urls, os.PathLike) else urls)]


def _pattern(url: str | os.PathLike[str]) -> str:
    pattern = from_here(url)
    _refuse(pattern.startswith("pipe:"), repr(url), "give the url that the command reads; the daemon fetches it itself")
    return pattern


def _deal(nodesplitter: Splitter, workersplitter: Splitter, endless: bool) -> dict[str, Any]:
    """Return the arguments of ShardDataset by which samples are dealt as the splitters deal shards."""
    _refuse(
        nodesplitter is not None and nodesplitter not in _OURS,
        "a nodesplitter of your own",
        "leave it out: ranks get equal shares; or give each rank its own urls, with nodesplitter=None",
    )
    # Where shards are drawn without end, workers that share them and workers that do not are the same to the job.
    _refuse(
        workersplitter is not wds.split_by_worker and not (endless and not workersplitter),
        "a workersplitter of your own",
        "leave it out: workers get equal shares of single samples, however few shards there are",
    )
    return {"rank": 0, "world_size": 1} if nodesplitter is None and not endless else {}


def _locate(samples: Iterable[Any]) -> Iterator[Any]:
    """Add the paths of local shards, as webdataset does; what `decode` turned into something else passes through."""
    for sample in samples:
        if isinstance(sample, dict) and (path := local_path(sample.get("__url__", ""))):
            sample["__local_path__"] = path
        yield sample


def _select(samples: Iterable[Sample], *, keep: Callable[[str], bool]) -> Iterator[Sample]:
    """Yield the samples with those members that are kept; one with none left is no sample."""
    for sample in samples:
        named = {name: sample[name] for name in _NAMES if name in sample}
        kept = {ext: value for ext, value in sample.items() if ext not in named and keep(f"{sample['__key__']}.{ext}")}
        if kept:
            yield named | kept


def _is_item_by_item(stage: Any) -> bool:
    function = stage.func if isinstance(stage, functools.partial) else getattr(stage, "f", stage)
    return function in (_locate, _select) or any(
        function is getattr(getattr(wds.filters, name, None), "f", ()) for name in _ITEM_BY_ITEM
    )


def _named(stage: Any) -> str:
    return str(getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__)).lstrip("_")


def _holds_samples(stage: Any) -> bool:
    return isinstance(stage, wds.detshuffle) or getattr(stage, "f", None) in (wds.shuffle.f, wds.batched.f)
