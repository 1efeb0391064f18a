"""`shardcache simulate`: what can be computed by hand, and what it says where it cannot compute."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from shardcache.cli.main import app
from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef

SHARDS = 64
SAMPLES = 100
SHARD_BYTES = 10_000_000
WHOLE = SHARDS * SHARD_BYTES
PRICES = '[[origin]]\nmatch = "s3://b/"\nprice_per_gb = 10\nprice_per_1000_requests = 2\n'
RUN = ("--ranks", "2", "--workers", "2", "--epochs", "4", "--shuffle-window", "2")

# Each of the two ranks visits half of the shards in each of four epochs, in each of its processes.
VISITS = 4 * SHARDS
READS = 2 * VISITS


@pytest.fixture
def index(tmp_path: Path) -> Path:
    refs = [ShardRef(f"s3://b/{number}.tar", "v", SHARD_BYTES, SAMPLES) for number in range(SHARDS)]
    path = tmp_path / "index.json"
    path.write_text(shardlist.write(refs))
    return path


def simulated(index: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["simulate", str(index), *RUN, *flags])


def figures(index: Path, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(simulated(index, *flags, "--json").output)
    return found


def test_a_disk_for_all_fetches_all_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any policy fetches all once; each version takes a request per fetch and per read."""
    config = index.with_name("c.toml")
    config.write_text(PRICES)
    monkeypatch.setenv("SHARDCACHE_CONFIG", str(config))
    found = figures(index, "--disk", "1GB")
    for name in ("shardcache", "MIN", "LRU"):
        policy = found["policies"][name]
        requests = 2 * SHARDS + SHARDS + READS  # of 10 MB in parts of 8 MiB
        assert policy["store_bytes"] == WHOLE
        assert policy["hits"] == 1 - SHARDS / READS
        assert policy["requests"] == requests
        assert policy["cost"] == pytest.approx(10 * WHOLE / 1e9 + 2 * requests / 1000)
    assert found["policies"]["none"]["store_bytes"] == READS * SHARD_BYTES
    assert WHOLE < found["disk_bytes"] < 1.002 * WHOLE, "tars, their sidecars, and one reservation"


def test_half_of_the_disk_keeps_half_and_lru_nothing(index: Path) -> None:
    """Ours is nearly as good as MIN; LRU has few hits in a shuffled order."""
    # All once, then what a disk of 32 shards has not kept of the epoch before.
    fewest = SHARDS + 3 * (SHARDS - 32)
    policies = figures(index, "--disk", "320MB")["policies"]
    hits = {name: policy["hits"] for name, policy in policies.items()}
    fetches = {name: (1 - part) * READS for name, part in hits.items()}
    assert hits["none"] == 0
    assert fetches["shardcache"] + VISITS / 10 < fetches["LRU"] < VISITS
    assert fewest <= fetches["MIN"]
    assert fetches["MIN"] <= fetches["shardcache"] <= fetches["MIN"] + VISITS / 50


def test_a_tier_takes_each_shard_store_bytes_once(index: Path) -> None:
    """The rest comes from other nodes, each of which holds an equal part of the dataset."""
    alone = figures(index, "--nodes", "4", "--disk", "100MB")
    tiered = figures(index, "--nodes", "4", "--disk", "100MB", "--tier")
    ours = tiered["policies"]["shardcache"]
    without = alone["policies"]["shardcache"]["store_bytes"]
    assert ours["store_bytes"] == WHOLE
    assert tiered["tier_disk_bytes"] == WHOLE // 4
    assert ours["between_nodes_bytes"] == without * 3 / 4 > WHOLE
    fetches = without // SHARD_BYTES
    parts = 2 * SHARDS
    assert ours["requests"] == 2 * fetches + READS + parts, (
        "version and permission for each fetch, a version per read"
    )


def test_fixed_groups_of_shards_stay_on_their_node(index: Path) -> None:
    """With `canonical_nodes`, a node's disk for its part takes nearly everything once."""
    store = [
        figures(index, "--nodes", "4", "--disk", "210MB", "--canonical-nodes", canonical)[
            "policies"
        ]["shardcache"]
        for canonical in ("1", "4")
    ]
    assert store[1]["store_bytes"] < 1.1 * WHOLE < store[0]["store_bytes"]


def test_first_batch_takes_the_first_shard_of_each_rank(index: Path) -> None:
    """All ranks of a node receive alike; without shuffling, each needs the beginning alone."""
    shuffled = figures(index, "--disk", "1GB", "--line", "80Mbit", "--batch-size", "10")
    assert shuffled["first_batch_s"] == 2 * SHARD_BYTES / 10e6
    for order in (("--no-shuffle",), ("--shuffle-window", "0")):
        flags = ("--disk", "1GB", "--line", "80Mbit", "--batch-size", "10", *order)
        assert figures(index, *flags)["first_batch_s"] == 2 * SHARD_BYTES / 10e6 / 10


def test_a_window_of_0_shuffles_shards_as_the_dataset_does(index: Path) -> None:
    """Both jobs hold a shard at a time, in orders of their own; unshuffled, LRU has few hits."""
    orders = [("--shuffle-window", "0"), ("--shuffle-window", "1"), ("--no-shuffle",)]
    runs = [figures(index, "--disk", "320MB", "--jobs", "2", *order) for order in orders]
    window_of_0, window_of_1, unshuffled = (run["policies"]["LRU"]["hits"] for run in runs)
    assert window_of_0 == window_of_1
    assert window_of_0 > unshuffled + 0.1


def test_jobs_that_begin_together_share_what_they_read_at_the_same_time(index: Path) -> None:
    """Jobs in one order fetch once together; spread over an epoch, each fetches for itself."""
    flags = ("--disk", "52MB", "--no-shuffle")
    alone = figures(index, *flags)["policies"]
    spread = figures(index, *flags, "--jobs", "2")["policies"]
    together = figures(index, *flags, "--jobs", "2", "--together")["policies"]
    for name in ("shardcache", "MIN", "LRU"):
        assert together[name]["store_bytes"] == alone[name]["store_bytes"]
        assert spread[name]["store_bytes"] > 1.5 * alone[name]["store_bytes"]


def test_workers_repeat_the_visits_of_their_rank_and_fetch_nothing_more(index: Path) -> None:
    """Workers need no more disk or start-up time; each asks for the shards' versions."""
    threads = figures(index, "--disk", "320MB", "--workers", "1")
    processes = figures(index, "--disk", "320MB", "--workers", "3")
    assert processes["disk_bytes"] == threads["disk_bytes"]
    assert processes["first_batch_s"] == threads["first_batch_s"]
    for name in ("shardcache", "MIN", "LRU"):
        one = threads["policies"][name]
        three = processes["policies"][name]
        assert three["store_bytes"] == one["store_bytes"]
        assert three["requests"] == one["requests"] + 2 * VISITS


def test_a_disk_of_a_window_for_each_rank_is_enough_for_any_workers(index: Path) -> None:
    """Two ranks with windows of two shards and one on its way suffice for any workers."""
    ran = simulated(index, "--disk", "52MB", "--workers", "16")
    assert ran.exit_code == 0, ran.output


@pytest.mark.slow
def test_a_picture_has_a_curve_for_each_policy(index: Path, tmp_path: Path) -> None:
    """Drawn over the disk of a node, for several jobs."""
    picture = tmp_path / "hits.svg"
    ran = simulated(index, "--disk", "500MB", "--jobs", "2", "--picture", str(picture))
    assert ran.exit_code == 0
    assert re.search(r"^hits +[\d.]+% +[\d.]+% +[\d.]+% +0.0%$", ran.output, re.MULTILINE)
    assert len(list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}polyline"))) == 3


def test_groups_may_be_far_more_than_shards(index: Path) -> None:
    """The largest `canonical_nodes` that a dataset takes costs no more than one for each shard."""
    found = figures(index, "--disk", "1GB", "--canonical-nodes", str(2**20))
    assert found["policies"]["shardcache"]["store_bytes"] == WHOLE


def test_sidecars_take_space_on_the_disk(index: Path) -> None:
    """A disk for all tars alone does not keep them, as small samples have large sidecars."""
    refs = [ShardRef(f"s3://b/{number}.tar", "v", SHARD_BYTES, 5_000) for number in range(SHARDS)]
    index.write_text(shardlist.write(refs))
    disk_bytes = WHOLE + 2 * SHARD_BYTES
    store_bytes = figures(index, "--disk", str(disk_bytes))["policies"]["shardcache"]["store_bytes"]
    assert store_bytes > WHOLE


@pytest.mark.parametrize(
    ("large", "keeps_all"),
    [pytest.param(0, True, id="first"), pytest.param(SHARDS - 1, False, id="last")],
)
def test_each_shard_reserves_for_itself_while_it_is_fetched(
    index: Path,
    large: int,
    keeps_all: bool,
) -> None:
    """A large shard reserves much beyond its size: there is space for it first, and none last."""
    refs = [
        ShardRef(f"s3://b/{number}.tar", "v", (64 if number == large else 1) * SHARD_BYTES, SAMPLES)
        for number in range(SHARDS)
    ]
    index.write_text(shardlist.write(refs))
    all_bytes = sum(ref.size_bytes or 0 for ref in refs)
    # The sidecars take 0.5 MB. Beyond its size, a small shard reserves 0.4 MB, the large one 20 MB.
    disk_bytes = all_bytes + 1_000_000
    flags = ("--ranks", "1", "--workers", "1", "--no-shuffle")
    policies = figures(index, *flags, "--disk", str(disk_bytes))["policies"]
    for name in ("shardcache", "MIN", "LRU"):
        assert (policies[name]["store_bytes"] == all_bytes) is keeps_all, name


@pytest.mark.parametrize("flags", [(), ("--no-shuffle",), ("--jobs", "2")])
def test_a_disk_of_the_reported_size_keeps_all(index: Path, flags: tuple[str, ...]) -> None:
    """The size includes the reserve for a shard on its way, so a smaller disk loses some."""
    used_bytes = figures(index, *flags, "--disk", "1GB")["disk_bytes"]
    store_bytes = [
        figures(index, *flags, "--disk", str(disk_bytes))["policies"]["shardcache"]["store_bytes"]
        for disk_bytes in (used_bytes, used_bytes - 1)
    ]
    assert store_bytes[0] == WHOLE
    assert store_bytes[1] > WHOLE


@pytest.mark.parametrize(
    ("text", "flags", "wrong", "remedy"),
    [
        (None, ("--picture", "/no/such/folder/hits.svg"), "does not exist", "create the folder"),
        (None, ("--picture", "/dev/full"), "cannot write the picture", "may write"),
        ("{}", (), 'it has no "shardlist"', "shardcache index"),
        ('{"shardlist": [{"url": "a.tar"}]}', (), "no sample counts", "shardcache index"),
        (None, ("--disk", "20MB"), "disk is full", "lower the window"),
        (None, ("--disk", "10.1MB"), "the shard takes 10.4 MB", "raise --disk"),
    ],
)
def test_errors_say_what_to_do(
    index: Path, text: str | None, flags: tuple[str, ...], wrong: str, remedy: str
) -> None:
    """An index without numbers, and a disk without room for what readers hold."""
    if text is not None:
        index.write_text(text)
    ran = simulated(index, "--disk", "1GB", *flags)
    assert ran.exit_code != 0
    assert wrong in ran.output
    assert remedy in ran.output
