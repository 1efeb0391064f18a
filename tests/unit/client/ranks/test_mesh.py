"""Ranks of torch's meshes, in a world of four of which this process is one."""

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers its backend

from shardcache.errors import ConfigError
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.group import RankGroup
from shardcache_client.ranks.mesh import MeshRanks, given_ranks
from shardcache_client.reader import ShardReader
from shardcache_client.webdataset import WebDataset

RANK = 6
WORLD = 8


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be rank 6 of 8."""
    monkeypatch.setenv("RANK", str(RANK))
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


def mesh(**sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("dp",), Topology(1, 2)),
        (("dp", "shard"), Topology(3, 4)),
        (("shard",), Topology(1, 2)),
    ],
)
def test_samples_are_divided_over_all_dimensions_row_major(
    names: tuple[str, ...], ranks: Topology
) -> None:
    """Of 2 × 2 × 2 ranks, the last but one is at (1, 1, 0)."""
    part = mesh(dp=2, shard=2, tp=2)[names]
    assert MeshRanks(part).ranks == ranks
    assert RankGroup(MeshRanks(part)).ranks == ranks


def test_process_group_and_mesh_without_names_divide_samples() -> None:
    """Ranks of a group have the order that it was made with."""
    assert MeshRanks(init_device_mesh("cpu", (2, 4))).ranks == Topology(RANK, WORLD)
    assert MeshRanks(dist.new_group([2, RANK, 7])).ranks == Topology(1, 3)
    assert MeshRanks(dist.group.WORLD).ranks == Topology(RANK, WORLD)


def test_worker_keeps_the_place_of_its_trainer() -> None:
    """A mesh cannot be pickled, and a spawned worker has no process group."""
    sent = pickle.dumps(MeshRanks(mesh(dp=2, tp=4)["dp"]))
    dist.destroy_process_group()
    assert pickle.loads(sent).ranks == Topology(1, 2)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)  # type: ignore[no-untyped-call]


def test_meshes_of_the_same_ranks_are_equal() -> None:
    """A mixture of sources with one mesh is known by it."""
    whole = mesh(dp=2, tp=4)
    assert (
        MeshRanks(whole["dp"])
        == MeshRanks(mesh(dp=2, tp=4)["dp"])
        == MeshRanks(dist.new_group([2, RANK]))
    )
    assert MeshRanks(whole["dp"]) != MeshRanks(dist.new_group([3, RANK]))


@pytest.mark.parametrize("called", [ShardReader, WebDataset])
@pytest.mark.parametrize("value", ["dp", 3, Topology(0, 2)])
def test_mesh_of_another_type_is_an_error(called: Callable[..., Any], value: object) -> None:
    """The remedy names what is wanted."""
    with pytest.raises(
        ConfigError,
        match=rf'{called.__name__}: mesh is [\s\S]*give the DeviceMesh itself.* mesh\["dp"\]',
    ):
        called("s3://bucket/0.tar", mesh=value)


def test_mesh_with_model_dimensions_is_an_error() -> None:
    """Ranks of a model would get samples of their own; dimensions of one rank are no matter."""
    with pytest.raises(ConfigError, match=r"'tp'[\s\S]*mesh\[\"dp\"\]"):
        MeshRanks(mesh(dp=2, tp=4))
    assert MeshRanks(mesh(pp=1, dp=8, tp=1)).ranks == Topology(RANK, WORLD)


def test_mesh_without_this_process_is_an_error() -> None:
    """It has no share of the samples."""
    with pytest.raises(ConfigError, match=r"\(0, 1\), and this process is rank 6"):
        _ = MeshRanks(DeviceMesh("cpu", [0, 1], _init_backend=False)).ranks


def test_mesh_and_ranks_exclude_each_other() -> None:
    """Nobody can tell which is meant."""
    with pytest.raises(ConfigError, match="only mesh"):
        given_ranks(MeshRanks(mesh(dp=8)), 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"dp": 2, "tp": 4}, 'mesh=mesh["dp"]'),
        (
            {"pp": 2, "dp_replicate": 2, "dp_shard": 1, "cp": 2},
            'mesh=mesh["dp_replicate", "dp_shard"]',
        ),
        ({"fsdp": 4, "experimental": 2}, 'mesh=mesh["fsdp"]'),
        ({"tp": 8}, "rank=0, world_size=1"),
        ({"node": 2, "gpu": 4}, "mesh=mesh[the names of its dimensions of data]"),
    ],
)
def test_mesh_that_divides_a_model_is_found(sizes: dict[str, int], line: str) -> None:
    """The error has the line to write if neither mesh nor ranks are given."""
    kept = {"deep": [mesh(**sizes)]}
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            RankGroup(None).refuse_resharding()
        assert f"ShardDataset(..., {line})" in str(caught.value)
    RankGroup(MeshRanks(dist.new_group([RANK]))).refuse_resharding()
    RankGroup(Topology(1, 2)).refuse_resharding()
    kept.clear()
    RankGroup(None).refuse_resharding()


def test_mesh_in_place_of_one_that_is_gone_is_found() -> None:
    """A search that found nothing holds for the meshes that there were, not for as many others."""
    for dimension in ("dp", "fsdp"):
        kept = mesh(**{dimension: WORLD})
        RankGroup(None).refuse_resharding()
        assert kept.size() == WORLD
        del kept
        gc.collect()
    kept = mesh(tp=WORLD)
    with pytest.raises(ConfigError, match="DeviceMesh with the dimensions"):
        RankGroup(None).refuse_resharding()
    assert kept.size() == WORLD


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 8, "tp": 1},
        {"dp_replicate": 2, "dp_shard": 4},
        {"dp": 2, "ep": 4},
        {"loss": 8},
        {"dp_cp": 8},
    ],
)
def test_mesh_of_data_alone_needs_no_argument(sizes: dict[str, int]) -> None:
    """Ranks of parameter shards, experts or a flattened mesh have samples of their own."""
    kept = mesh(**sizes)
    RankGroup(None).refuse_resharding()
    assert kept.size() == WORLD


def test_slice_with_a_joined_dimension_is_no_sign_of_a_model() -> None:
    """Accelerate joins "dp_shard" and "cp" for its parameters, and does so without "cp" as well."""
    whole = mesh(dp_replicate=2, dp_shard=4)
    kept = whole["dp_shard"]._flatten("dp_shard_cp")
    RankGroup(None).refuse_resharding()
    assert kept.size() == 4


def test_model_of_transformers_with_a_tp_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 5 divide it over a mesh without names."""

    class PreTrainedModel:
        tp_size: int | None = None

    class Llama(PreTrainedModel):
        pass

    module: Any = ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = PreTrainedModel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = Llama()
    RankGroup(None).refuse_resharding()
    divided = Llama()
    divided.tp_size = WORLD
    with pytest.raises(ConfigError, match=r"tp_plan [\s\S]*rank=0, world_size=1"):
        RankGroup(None).refuse_resharding()
    assert model.tp_size is None


def test_parallelism_of_accelerate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its mesh, or, for DeepSpeed's sequence parallelism, without one."""
    config = ParallelismConfig(cp_size=2, dp_shard_size=4)
    state = {"parallelism_config": config}
    monkeypatch.setattr(AcceleratorState, "_shared_state", state)
    state["device_mesh"] = config.get_device_mesh("cpu")
    with pytest.raises(ConfigError, match=r'mesh=accelerator.torch_device_mesh\["dp_shard"\]'):
        RankGroup(None).refuse_resharding()
    state |= {
        "parallelism_config": ParallelismConfig(sp_size=2, dp_shard_size=4),
        "device_mesh": None,
    }
    del config
    with pytest.raises(ConfigError, match=r"rank=accelerator\.process_index // 2, world_size="):
        RankGroup(None).refuse_resharding()
    state["parallelism_config"] = ParallelismConfig(dp_shard_size=8)
    RankGroup(None).refuse_resharding()
