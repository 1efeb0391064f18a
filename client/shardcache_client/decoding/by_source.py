"""The functions that a mixture applies to each sample: those of its source, then its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardcache_client.decoding.pipeline import Dropped, Pipeline
from shardcache_client.files.slicing import Sample
from shardcache_client.files.view import View


@dataclass(frozen=True)
class PipelineBySource(Pipeline):
    """The pipelines of several sources; a sample's `__source__` chooses its own. Otherwise has only stages.

    Attributes:
        sources: by name, in the order of the manifest.
        firsts: number in the manifest of each source's first shard.
    """

    sources: Mapping[str, Pipeline] = field(default_factory=dict)
    firsts: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return True if samples have to go through these pipelines."""
        return bool(self.stages) or any(self.sources.values())

    @property
    def filters(self) -> bool:
        """True if samples may be filtered out."""
        return super().filters or any(source.filters for source in self.sources.values())

    def view(self, shard: int) -> View:
        """Return the form in which samples of a shard are read."""
        return [*self.sources.values()][bisect_right(self.firsts, shard) - 1].view(shard)

    def __call__(self, sample: Sample) -> Any:
        """Return what becomes of a sample, or a `Dropped`. Raises what the pipelines raise."""
        key, url = sample.get("__key__"), sample.get("__url__")
        item = self.sources[sample["__source__"]](sample)
        return item if item.__class__ is Dropped else self._staged(item, key, url)
