"""The settings of a dataset, which its iterations share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardcache_client.daemon.session import SessionPool
from shardcache_client.decoding import Pipeline
from shardcache_client.order.deal import Deal
from shardcache_client.order.manifest import Manifest
from shardcache_client.stages.stage import Stage

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


@dataclass(frozen=True)
class DatasetSettings:
    """What determines a dataset's samples, and how they are read.

    Attributes:
        deal: of its samples, or of its shards if these are not counted.
        stage: what regroups the samples; None if they come one by one.
        handover: passes samples to other processes without a copy; None if they are copied.
        epochs: number of epochs in the training run; None for no limit.
        datasets: identifiers in states: of counted samples (True), and of uncounted shards (False).
        seeds: those drawn, as in a state.
    """

    sessions: SessionPool
    manifest: Manifest
    deal: Deal
    pipeline: Pipeline = field(default_factory=Pipeline)
    stage: Stage | None = None
    handover: Handover | None = None
    epochs: int | None = None
    datasets: Mapping[bool, str] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
