"""distributed.py and torch_group.py over torch's own stores: finding them, agreeing, comparing."""

import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed
import torch.testing._internal.distributed.fake_pg  # registers a backend of one process
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardcache.errors import (
    ConfigError,
    ManifestMismatchError,
    NotFoundError,
    RanksError,
    RankTimeoutError,
)
from shardcache.shared.protocol import ShardRef
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.mixture import MixedSource, MixtureOptions, weights_of
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.shards.manifest import JoinedManifest, Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.ranks import distributed, shared_manifest
from shardcache_client.ranks.agreement import Agreement
from shardcache_client.ranks.key_value_store import KeyValueStore, StoreAddress, StoreLocator
from shardcache_client.ranks.shared_manifest import share_manifest
from shardcache_client.ranks.torch_group import TorchRankGroup

WORLD = 3
SHORT_S = 0.5  # of a wait that is to be in vain
PATIENT_S = 3.0  # of one that is at first answered, also on a machine that has much else to do


@pytest.fixture
def server() -> TCPStore:
    """A store as the first rank or torchrun holds it."""
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, server: TCPStore) -> pytest.MonkeyPatch:
    """The variables of a launcher that started 3 ranks around that store."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "RANK": "0",
        "WORLD_SIZE": str(WORLD),
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


WITHOUT_DISTRIBUTED = """
import torch.distributed

torch.distributed.is_available = lambda: False  # as in a build without it

from shardcache.errors import ConfigError
from shardcache_client import ShardDataset
from shardcache_client.ranks.torch_group import TorchRankGroup

try:
    TorchRankGroup(None, ["s3://bucket/a.tar"], 1.0).draw_seed()
except ConfigError as exn:
    print(exn.message)
"""


def test_torch_without_distributed_is_imported_and_has_no_store(env: pytest.MonkeyPatch) -> None:
    """Ranks of a launcher then cannot draw a seed together, and the error says so."""
    command = [sys.executable, "-c", WITHOUT_DISTRIBUTED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "they share no key-value store" in done.stdout


def member(channel: str, rank: int, timeout_s: float = 20.0) -> Agreement:
    """Return the agreement of one rank."""
    return Agreement(channel, Topology(rank, WORLD), timeout_s)


def group(channel: str) -> list[Agreement]:
    """Return the agreements of all ranks."""
    return [member(channel, rank) for rank in range(WORLD)]


def at_once(*calls: Callable[[], int]) -> list[int | Exception]:
    """Call all at the same time; return what each returned or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        ends = [pool.submit(call) for call in calls]
        return [end.exception() or end.result() for end in ends]  # type: ignore[misc]


def ask(agreement: Agreement, name: str, value: int) -> Callable[[], int]:
    """Return the call of one rank."""
    return lambda: agreement.greatest(name, value)


def all_agree(*ranks: Agreement) -> bool:
    """Return whether all get the greatest of their first round."""
    return (
        at_once(*[ask(rank, "round 0", value) for value, rank in enumerate(ranks)])
        == [WORLD - 1] * WORLD
    )


# Where the ranks meet


def test_ranks_are_unknown_without_torch_distributed() -> None:
    """Nothing is guessed where torch.distributed was not initialised."""
    assert distributed.ranks() is None


def test_the_environment_leads_to_the_store(env: pytest.MonkeyPatch, server: TCPStore) -> None:
    """A launcher's variables name the store and the ranks; a single rank needs no store."""
    place = StoreLocator()
    env.setenv("RANK", "1")
    assert place.address() == StoreAddress("127.0.0.1", server.port, WORLD, 1)
    for name, value in (("MASTER_PORT", ""), ("WORLD_SIZE", "1")):
        with env.context() as other:
            other.setenv(name, value)
            other.setenv("RANK", "0")
            assert place.address() is None


def test_a_process_group_leads_to_its_store(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed initialised without variables is found, even after pickling."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    torch.distributed.init_process_group("fake", store=server, rank=1, world_size=2)
    try:
        assert distributed.ranks() == Topology(1, 2)
        told = pickle.dumps(StoreLocator())
    finally:
        torch.distributed.destroy_process_group()
    assert pickle.loads(told).address() == StoreAddress("127.0.0.1", server.port, 2, 1)
    assert StoreLocator().address() is None


def test_address_without_listener_is_no_store(server: TCPStore) -> None:
    """A port without a listener is an error that names it."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(RanksError, match=f"127.0.0.1:{port}"):
            KeyValueStore.connect(StoreAddress("127.0.0.1", port, 2))


def test_a_server_of_another_kind_is_no_store() -> None:
    """A peer that accepts and stays silent is given up in time, unlike by torch alone."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RanksError):
        KeyValueStore.connect(
            StoreAddress("127.0.0.1", silent.getsockname()[1], 2), timeout_s=SHORT_S
        )


def test_jobs_of_other_names_do_not_meet(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of torchrun that were given one store see nothing of each other."""
    stores = []
    for run in ("one", "two"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        stores.append(KeyValueStore(server, run))
    stores[0].set("a", "1")
    assert not stores[1].has("a")


# Agreeing


def test_all_ranks_get_the_greatest_and_nothing_stays(
    env: pytest.MonkeyPatch, server: TCPStore
) -> None:
    """Each round gives the same number everywhere and leaves the store empty."""
    group_of_ranks = group("rounds")
    keys = server.num_keys()
    for number, values in enumerate([(1, 2, 3), (9, 0, 4), (5, 5, 5)]):
        calls = [
            ask(rank, f"round {number}", value)
            for rank, value in zip(group_of_ranks, values, strict=True)
        ]
        assert at_once(*reversed(calls)) == [max(values)] * WORLD
    assert server.num_keys() == keys


@pytest.mark.slow
def test_a_missing_rank_is_named(env: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up in time and tells all waiting ranks who is missing."""
    first, second, third = group("missing")
    assert all_agree(first, second, third)
    first._timeout_s = PATIENT_S  # only now: connecting may take longer
    ends = at_once(ask(first, "round 1", 1), ask(second, "round 1", 2))
    assert [type(end) for end in ends] == [RankTimeoutError] * 2
    assert ["missing: 2 (round 1 of missing)" in str(end) for end in ends] == [True, True]


def test_a_missing_rank_0_is_named(env: pytest.MonkeyPatch) -> None:
    """Nobody waits for rank 0 without limit."""
    with pytest.raises(RankTimeoutError, match=r"rank 2 waited 0\.5 s for rank 0"):
        member("nobody", 2, SHORT_S).greatest("round 0", 1)


def test_ranks_that_ask_for_different_things(env: pytest.MonkeyPatch) -> None:
    """Ranks out of step are told so; their numbers are never mixed."""
    first, second, third = group("steps")
    assert all_agree(first, second, third)
    ends = at_once(ask(first, "round 1", 1), ask(second, "round 2", 2), ask(third, "round 1", 3))
    assert {type(end) for end in ends} == {RanksError}
    assert all(
        "rank 1 asks for round 2 of steps, but rank 0 for round 1" in str(end) for end in ends
    )


@pytest.mark.slow
def test_messages_of_an_abandoned_iteration_are_ignored(env: pytest.MonkeyPatch) -> None:
    """A greeting and a value left by former readers do not reach later ones."""
    with pytest.raises(RankTimeoutError):
        member("again", 1, SHORT_S).greatest("round 0", 99)
    first = member("again", 0)
    second = member("again", 1, PATIENT_S)
    third = member("again", 2)
    assert all_agree(first, second, third)
    with pytest.raises(RankTimeoutError):
        second.greatest("round 1", 99)
    assert at_once(*[ask(rank, "round 1", 4) for rank in group("again")]) == [4] * WORLD


@pytest.mark.slow
def test_replicas_agree_with_one_reader_of_each_other_rank(server: TCPStore) -> None:
    """Two processes of each of two ranks get the greatest, whichever of them meet."""
    places = [
        StoreLocator(StoreAddress("127.0.0.1", server.port, 4, process)) for process in range(4)
    ]
    for _ in range(2):
        readers = [
            Agreement("replicas", Topology(process // 2, 2), 30.0, places[process])
            for process in range(4)
        ]
        for number in range(2):
            values = (3, 3, 7 + number, 7 + number)
            calls = [
                ask(reader, f"round {number}", value)
                for reader, value in zip(readers, values, strict=True)
            ]
            assert at_once(*calls) == [7 + number] * 4


def test_missing_store_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that know of no store cannot agree, and the error names the variables."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        Agreement("lost", Topology(0, 2)).greatest("round 0", 1)


# Sharing and comparing


def manifest(shards: int = 4, last_version: str = "b", *, counts: bool = True) -> Manifest:
    """Return a manifest whose last shard has the version."""
    refs = [
        ShardRef(f"s3://b/{number}.tar", "a", 10, 5 if counts else None) for number in range(shards)
    ]
    return Manifest.of(
        [*refs[:-1], ShardRef(refs[-1].url, last_version, 10, 5 if counts else None)]
    )


@pytest.fixture
def url() -> Iterator[str]:
    """A url of no other test, since datasets are counted by urls in each process."""
    yield f"s3://b/{secrets.token_hex(4)}/"


def datasets(url: str) -> list[TorchRankGroup]:
    """Return the group of each rank, of a new dataset."""
    return [TorchRankGroup(Topology(rank, WORLD), [url], 5.0) for rank in range(WORLD)]


def shared(
    server: TCPStore, rank: int, resolve: Callable[[], Manifest], name: str = "train/0"
) -> Manifest:
    """Return the manifest that a rank gets."""
    return share_manifest(KeyValueStore(server, "test"), name, Topology(rank, WORLD), resolve, 5.0)


def refuse() -> Manifest:
    """Resolve nothing."""
    raise NotFoundError("no such bucket", url="s3://b/")


def test_restarted_rank_keeps_the_same_manifest(server: TCPStore) -> None:
    """Rank 0 lists once for all ranks, and the result lasts as long as the store."""
    assert shared(server, 0, manifest) == manifest()
    assert shared(server, 1, refuse) == manifest()
    assert shared(server, 0, lambda: manifest(5)) == manifest()
    assert shared(server, 0, lambda: manifest(5), "train/1") == manifest(5)


@pytest.mark.parametrize("named", [True, False])
def test_ranks_know_whether_an_index_file_names_the_versions(server: TCPStore, named: bool) -> None:
    """As rank 0 does: else a replaced shard would be read by some ranks, and refused by others."""
    given = replace(manifest(), versions_named=named)
    ranks = [shared(server, rank, lambda: given, f"index/{named}") for rank in range(2)]
    assert [each.is_replaceable for each in ranks] == [not named] * 2


def test_an_error_of_rank_0_does_not_outlive_a_restart(server: TCPStore) -> None:
    """Every rank gets it as it was; rank 0, started anew, looks again."""
    for rank, resolve in ((0, refuse), (1, manifest)):
        with pytest.raises(NotFoundError, match="no such bucket"):
            shared(server, rank, resolve)
    assert shared(server, 0, manifest) == manifest()
    assert shared(server, 1, refuse) == manifest()


def test_restarted_rank_does_not_get_the_error_from_before(
    server: TCPStore, env: pytest.MonkeyPatch
) -> None:
    """A restarted rank waits until rank 0 looks again, as the error may be gone by now."""
    with pytest.raises(NotFoundError, match="no such bucket"):
        shared(server, 0, refuse, "train/2")
    env.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RankTimeoutError, match=r"waited 0\.01 s for rank 0"):
        share_manifest(KeyValueStore(server, "test"), "train/2", Topology(1, WORLD), refuse, 0.01)
    assert shared(server, 0, manifest, "train/2") == manifest()
    assert shared(server, 1, refuse, "train/2") == manifest()


def test_nodes_that_have_counted_other_numbers_of_restarts_share_a_manifest(
    server: TCPStore, env: pytest.MonkeyPatch
) -> None:
    """As when the node of rank 0 alone had a worker that failed, or another node joined later."""
    env.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert shared(server, 0, manifest, "train/3") == manifest()
    env.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert shared(server, 1, refuse, "train/3") == manifest()


def test_the_shard_that_differs_is_named(env: pytest.MonkeyPatch, url: str) -> None:
    """A rank with another version than the first is told the shard and both versions."""
    first, second, third = datasets(url)
    second.compare_manifest(manifest(), counted=True)
    third.compare_manifest(manifest(), counted=True)
    message = (
        "rank 0 would read different shards than rank 1: "
        r"shard 3 is s3://b/3.tar \(version c, .*version b,"
    )
    for _ in range(2):  # a second try fails as the first
        with pytest.raises(ManifestMismatchError, match=message):
            first.compare_manifest(manifest(last_version="c"), counted=True)


@pytest.mark.slow
def test_dataset_with_named_ranks_is_not_compared_with_one_without(
    env: pytest.MonkeyPatch, url: str
) -> None:
    """Both are the first dataset of these urls among ranks named in the same way."""
    detected = TorchRankGroup(None, [url], 5.0)
    named = TorchRankGroup(Topology(1, WORLD), [url], 5.0)
    detected.compare_options(DealOptions(Shuffle(7)).common_options())
    named.compare_options(DealOptions(None).common_options())


def test_the_option_that_differs_is_named(env: pytest.MonkeyPatch, url: str) -> None:
    """Ranks with another seed or other weights would repeat some samples and lose others."""
    groups = datasets(url)
    shuffled = DealOptions(Shuffle(7))
    groups[0].compare_options(shuffled.common_options())
    groups[1].compare_options(shuffled.common_options())
    with pytest.raises(
        RanksError, match=r"rank 2 .* than rank 0, as they differ in shuffle, .*seed=8.*seed=7"
    ):
        groups[2].compare_options(DealOptions(Shuffle(8)).common_options())
    sources = tuple(MixedSource(name, manifest()) for name in ("web", "code"))
    mixtures = [
        MixtureOptions(samples_per_epoch=20, sources=sources, weights=weights_of(weights, sources))
        for weights in ({"web": 1, "code": 1}, {"web": 3, "code": 1})
    ]
    copies = [group.of_copy() for group in groups]
    for copy in copies[:2]:
        copy.compare_options(mixtures[0].common_options())
    with pytest.raises(RanksError, match="differ in weights"):
        copies[2].compare_options(mixtures[1].common_options())


@pytest.mark.slow
def test_ranks_of_other_batch_sizes_get_an_error(env: pytest.MonkeyPatch, url: str) -> None:
    """Ranks that must be equal would wait for each other; others may differ."""
    groups = datasets(url)
    for rank, batch_size in enumerate((1, 8)):
        groups[rank].compare_options(DealOptions(batch_size=batch_size).common_batch_options())
    groups[0].compare_options(DealOptions(batch_size=8).common_batch_options())
    groups[2].compare_options(DealOptions(batch_size=4, even=None).common_batch_options())
    with pytest.raises(RanksError, match=r"rank 2 .* differ in batch_size: 4 here and 8 there"):
        groups[2].compare_options(DealOptions(batch_size=4).common_batch_options())


def test_a_large_manifest_goes_in_pieces(
    env: pytest.MonkeyPatch, server: TCPStore, url: str
) -> None:
    """A list longer than a store takes at once arrives whole: its last shard is compared."""
    env.setattr(shared_manifest, "_PIECE_CHARACTERS", 1000)
    shards = [ShardRef(f"s3://b/{number}.tar", secrets.token_hex(16)) for number in range(200)]
    first, second, _ = datasets(url)
    before = server.num_keys()
    first.compare_manifest(Manifest.of(shards), counted=False)
    # The summary, the number of pieces, and more than one piece.
    assert server.num_keys() - before > 3
    with pytest.raises(ManifestMismatchError, match="shard 199 is"):
        second.compare_manifest(
            Manifest.of([*shards[:-1], ShardRef("s3://b/other.tar")]), counted=False
        )


def test_ranks_that_join_other_shards_get_an_error(env: pytest.MonkeyPatch, url: str) -> None:
    """It names the first of the shards, which are read beside the same ones on both ranks."""
    first, second, _ = datasets(url)
    columns = [
        JoinedManifest("cap.", Manifest.of([ShardRef(f"s3://b/{name}.tar")]))
        for name in ("cap", "other")
    ]
    first.compare_manifest(replace(manifest(), columns=tuple(columns[:1])), counted=False)
    with pytest.raises(ManifestMismatchError, match=r"other\.tar .* here and s3://b/cap\.tar"):
        second.compare_manifest(replace(manifest(), columns=tuple(columns[1:])), counted=False)


def test_datasets_are_distinguished_by_urls_and_turn(env: pytest.MonkeyPatch, url: str) -> None:
    """The second dataset of the same urls, or one of others, may list other shards."""
    earlier = datasets(url)[0]
    later = datasets(url)[0]
    other = datasets(url + "x")[0]
    for number, dataset in enumerate([earlier, later, other], 1):
        dataset.compare_manifest(manifest(number), counted=True)


def test_counts_that_change_nothing_are_not_compared(env: pytest.MonkeyPatch, url: str) -> None:
    """A rank whose daemon has counted some shards reads as one that has counted none."""
    first, second, third = datasets(url)
    uncounted = manifest(counts=False)
    first.compare_manifest(uncounted, counted=False)
    second.compare_manifest(Manifest.of([manifest()[0], *list(uncounted)[1:]]), counted=False)
    with pytest.raises(ManifestMismatchError, match="samples 5"):
        third.compare_manifest(manifest(), counted=True)


def test_counts_of_joined_shards_are_not_compared(env: pytest.MonkeyPatch, url: str) -> None:
    """Only the first source's samples are dealt, so the others' counts may differ."""
    first, second, third = datasets(url)
    counted, uncounted = (
        JoinedManifest("cap.", manifest(counts=counts)) for counts in (True, False)
    )
    first.compare_manifest(replace(manifest(), columns=(counted,)), counted=True)
    second.compare_manifest(replace(manifest(), columns=(uncounted,)), counted=True)
    with pytest.raises(ManifestMismatchError, match=r"shard 0 is s3://b/0\.tar .* samples 5"):
        third.compare_manifest(replace(manifest(counts=False), columns=(counted,)), counted=True)


@pytest.mark.slow
def test_restarted_job_may_list_again(env: pytest.MonkeyPatch, url: str) -> None:
    """The new lists count although torchrun's store outlives a restart."""
    first, second, _ = datasets(url)
    first.compare_manifest(manifest(3), counted=True)
    env.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second.compare_manifest(manifest(4), counted=True)


def test_ranks_without_a_store_iterate_without_comparing(
    env: pytest.MonkeyPatch, server: TCPStore, url: str
) -> None:
    """A rank that was named as the only one, and a store that is gone: iteration goes on."""
    keys = server.num_keys()
    TorchRankGroup(Topology(), [url], 5.0).compare_manifest(manifest(), counted=True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        env.setenv("MASTER_PORT", str(unused.getsockname()[1]))
        datasets(url)[2].compare_manifest(manifest(), counted=True)
    assert server.num_keys() == keys
