"""Files of formats other than tar in object stores: two ranks, resumed within an epoch."""

import json
import lzma
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import ShardDataset
from support import TESTS
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.file_formats import EXPECTED, FORMATS, SAMPLES, SHARDS, plain, rows_of_shard
from support.stores.buckets import Bucket
from support.stores.object_servers import HubServer

DATA = TESTS / "data" / "formats"
ARRAY_RECORD = "groups.array_record"
ARRAY_RECORD_LABELS = range(-3, 9)

# A zip first, which is read as it is: each parquet file takes a process that imports pyarrow.
NAMES = ("stored.zip", "a.parquet", "deflated.ZIP", "a.jsonl", "d.jsonl.zst", "c.tfrecord.gz")


def uploaded(bucket: Bucket, name: str, files: list[bytes], samples: int) -> tuple[str, int]:
    """Put files of a format and their index into the bucket; return the url and the bytes."""
    rows = []
    for number, data in enumerate(files):
        bucket.put(f"{name}/{number}-{name}", data)
        rows.append({"url": f"{number}-{name}", "nsamples": samples})
    bucket.put(f"{name}/index.json", json.dumps({"wids_version": 1, "shardlist": rows}).encode())
    return f"{bucket.url}/{name}/index.json", sum(map(len, files))


def read_by_two_jobs(url: str, daemon: Daemon) -> list[dict[str, Any]]:
    """Return the samples of two ranks: two batches, and the rest in a job that continues."""
    found = []
    for rank in range(2):

        def loader(rank: int = rank) -> Any:
            dataset = ShardDataset(
                url, shuffle=True, seed=3, rank=rank, world_size=2, socket=daemon.socket
            )
            return dataset.loader(batch_size=2, num_workers=2, collate_fn=list)

        stopped = loader()
        batches = list(islice(stopped, 2))
        fresh = loader()
        fresh.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        batches += fresh
        found += [sample for batch in batches for sample in batch]
    return found


@pytest.mark.parametrize("name", first_quick(NAMES))
def test_samples_come_once_from_a_bucket(store_daemon: Daemon, bucket: Bucket, name: str) -> None:
    """Each sample is read once by the two jobs, and each byte is fetched once for them."""
    files = [FORMATS[name](rows_of_shard(shard)) for shard in range(SHARDS)]
    url, size_bytes = uploaded(bucket, name, files, SAMPLES)
    smallest_bytes = min(map(len, files))
    before_bytes = store_daemon.status()["counters"]["origin_bytes"]

    found = [plain(sample) for sample in read_by_two_jobs(url, store_daemon)]
    assert sorted(found, key=lambda row: str(row["__key__"])) == EXPECTED

    store_daemon.await_publication()
    fetched_bytes = store_daemon.status()["counters"]["origin_bytes"] - before_bytes
    # The index is smaller than any file.
    assert size_bytes <= fetched_bytes < size_bytes + smallest_bytes


@pytest.mark.slow
def test_array_records_come_from_a_bucket(store_daemon: Daemon, bucket: Bucket) -> None:
    """Files that Google's library has written."""
    data = lzma.decompress((DATA / f"{ARRAY_RECORD}.xz").read_bytes())
    url, _ = uploaded(bucket, ARRAY_RECORD, [data] * 2, len(ARRAY_RECORD_LABELS))
    found = Counter(sample["label"] for sample in read_by_two_jobs(url, store_daemon))
    assert found == Counter(dict.fromkeys(ARRAY_RECORD_LABELS, 2))


@pytest.mark.slow
def test_parquet_files_come_from_the_hub(tmp_path: Path) -> None:
    """A glob over the repository finds LFS files, as the Hub has them, without our index."""
    pytest.importorskip("huggingface_hub", minversion="2", reason="pip install 'shardcache[hf]'")
    with HubServer() as hub:
        hub.content.valid_urls = 100  # several files are fetched at a time
        for shard in range(SHARDS):
            name = f"train-{shard:05d}-of-{SHARDS:05d}.parquet"
            hub.put_lfs(
                f"/datasets/org/set/resolve/main/data/{name}",
                FORMATS["a.parquet"](rows_of_shard(shard)),
            )
        hub.put("/datasets/org/set/resolve/main/README.md", b"---\n---\n")
        with Daemon(
            tmp_path, env={"HF_ENDPOINT": hub.endpoint_url, "HF_TOKEN": hub.TOKEN}
        ) as daemon:
            url = "hf://datasets/org/set/data/train-*.parquet"
            dataset = ShardDataset(url, shuffle=False, socket=daemon.socket)
            assert [plain(sample) for sample in dataset] == EXPECTED
            found = [plain(sample) for sample in read_by_two_jobs(url, daemon)]
            assert sorted(found, key=lambda row: str(row["__key__"])) == EXPECTED
            of_folder = ShardDataset("hf://datasets/org/set/", shuffle=False, socket=daemon.socket)
            assert [plain(sample) for sample in of_folder] == EXPECTED
