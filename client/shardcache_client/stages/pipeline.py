"""The steps from a sample's bytes to a dataset's item: decoding, then the user's functions.

A sample is a dict of the members that were read from a shard. An item is what the dataset yields
for a sample. A stage turns one item into another, or leaves it out: it then returns a `Dropped` in
place of an item. Groups of several samples are made later, by a `Stage`.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardcache.shared.exceptions import DecodeError, MissingMemberError, UnmatchedKeyError
from shardcache_client.samples.decoders import Spec
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import Sample
from shardcache_client.samples.token_blocks import TokenBlocks
from shardcache_client.stages.decode import Decode, Missing
from shardcache_client.stages.item_stage import SILENT_ENDS, Dropped, ItemStage
from shardcache_client.stages.map import Map

DecodeArgument = Callable[[Sample], Any] | Mapping[str, Spec] | str


@dataclass(frozen=True)
class Pipeline:
    """Makes the items of a dataset from samples' bytes. Can be pickled if its functions can.

    Attributes:
        decode: chooses and decodes the members.
        stages: further stages, in their order.
    """

    decode: Decode = field(default_factory=Decode)
    stages: tuple[ItemStage, ...] = ()

    @classmethod
    def of(
        cls,
        decode: DecodeArgument | None,
        members: Iterable[str] | None,
        missing: Missing,
        blocks: TokenBlocks | None = None,
    ) -> "Pipeline":
        """Return the pipeline that a dataset's arguments describe. Raises ConfigError."""
        if decode is None or isinstance(decode, str | Mapping):
            return cls(Decode.of(decode, members, missing, blocks))
        # A function gets whole samples: it becomes a stage after the choice of members.
        return cls(Decode.of(None, members, missing, blocks), (Map(decode),))

    def __bool__(self) -> bool:
        """Return True if this pipeline does anything with samples."""
        return self.decode.is_needed or bool(self.stages)

    @property
    def has_filters(self) -> bool:
        """True if samples may be filtered out."""
        return any(stage.leaves_out for stage in self.stages)

    @property
    def leaves_out(self) -> bool:
        """True if samples may be left out without an error, by a filter or for a missing member."""
        return self.has_filters or self.decode.leaves_out

    @property
    def named_sources(self) -> tuple[Sequence[str], Sequence[int]]:
        """The names of a mixture's sources, and the number of each source's first shard.

        Both are empty for a dataset that is not a mixture.
        """
        return (), ()

    def view(self, shard: int, joined_prefix: str | None = None) -> View:
        """Return the form in which samples are read.

        Args:
            shard: number of the samples' shard in the manifest.
            joined_prefix: prefix of another source that is joined with this one. The result is then
                the form in which that source's samples are read. None for the samples of `shard`.
        """
        return self.decode.view(joined_prefix)

    def then(self, stage: ItemStage) -> "Pipeline":
        """Return this pipeline with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    def __call__(self, sample: Sample) -> Any:
        """Return the item made of a sample, or a `Dropped`.

        Raises MissingMemberError, DecodeError.
        """
        item: Any = sample
        if self.decode.is_needed:
            item = self.decode.apply(sample)
            if item.__class__ is Dropped:  # isinstance() of an enum takes several times as long
                return item
        if not self.stages:
            return item
        return self._apply_stages(item, sample.get("__key__"), sample.get("__url__"))

    def _apply_stages(self, item: Any, key: object, url: str | None) -> Any:
        """Return the item that the stages make of an item, or a `Dropped`.

        Args:
            item: the decoded sample.
            key: the sample's key, for messages.
            url: the url of the sample's shard, for messages.
        """
        try:
            for stage in self.stages:
                item = stage.apply(item)
                if item.__class__ is Dropped:
                    return item
        except (UnmatchedKeyError, MissingMemberError):
            raise  # raised by a stage that joins rows of a table, not by the user's function
        # A stage runs the user's code, which may raise anything.
        except (Exception, *SILENT_ENDS) as exn:
            raise DecodeError(
                f"the sample {key!r} could not be decoded "
                f"({type(exn).__name__}: {exn}{_place_hint(exn)}{_members_hint(item, exn)})",
                url=url,
                remedy="fix the sample or the function",
            ) from exn
        return item


@dataclass(frozen=True)
class PipelineBySource(Pipeline):
    """The pipelines of a mixture's sources; a sample's `__source__` chooses its pipeline.

    The mixture's own stages come after the source's pipeline. The mixture itself decodes nothing.

    Attributes:
        sources: the pipelines by the names of their sources, in the order of the manifest.
        first_shards: for each source, the number in the manifest of its first shard.
    """

    sources: Mapping[str, Pipeline] = field(default_factory=dict)
    first_shards: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return True if the mixture's stages or any source's pipeline does anything."""
        return bool(self.stages) or any(self.sources.values())

    @property
    def has_filters(self) -> bool:
        """True if samples may be filtered out."""
        return super().has_filters or any(each.has_filters for each in self.sources.values())

    @property
    def leaves_out(self) -> bool:
        """True if samples of any source may be left out without an error."""
        return super().leaves_out or any(each.leaves_out for each in self.sources.values())

    @property
    def named_sources(self) -> tuple[Sequence[str], Sequence[int]]:
        """The names of the sources, and the number of each source's first shard."""
        return tuple(self.sources), self.first_shards

    def view(self, shard: int, joined_prefix: str | None = None) -> View:
        """Return the form in which samples of a shard are read; see `Pipeline`."""
        source = bisect_right(self.first_shards, shard) - 1
        pipelines = list(self.sources.values())
        return pipelines[source].view(shard, joined_prefix)

    def __call__(self, sample: Sample) -> Any:
        """Return the item made of a sample, or a `Dropped`. Raises any error of the pipelines."""
        # Key and url are read first, because the source's functions may change the sample.
        key = sample.get("__key__")
        url = sample.get("__url__")
        item = self.sources[sample["__source__"]](sample)
        if item.__class__ is Dropped:
            return item
        return self._apply_stages(item, key, url)


def _members_hint(item: object, exn: BaseException) -> str:
    """Return a clause with the names of a sample's members, after a KeyError of a function.

    Returns "" after any other error, and for an item that a function has made of the sample.
    """
    if not isinstance(exn, KeyError):
        return ""
    if not isinstance(item, dict) or "__key__" not in item:
        return ""
    members = [name for name in item if not name.startswith("__")]
    return f"; it has: {', '.join(members)}"


def _place_hint(exn: BaseException) -> str:
    """Return a clause with the line of the user's function that raised an exception.

    It is in the message because a DataLoader does not show the original traceback.
    """
    trace = exn.__traceback__
    # The traceback begins with frames of this package, which precede the user's function.
    while trace and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    if not trace:
        return ""
    return f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
