"""Shards written to object stores: by the command and by `ShardWriter`."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardcache.errors import AccessDeniedError, ConfigError, NotFoundError, OriginUnavailableError, SampleError
from shardcache.writing import ShardWriter
from support.programs.cli import shardcache
from support.shards.tars import random_samples
from support.stores.buckets import Bucket
from support.stores.faulty_proxy import FaultyProxy
from support.stores.mischief import Mischief

MIB = 1024**2


def keys(bucket: Bucket) -> list[str]:
    """Return the names of all objects."""
    found = bucket.server.client.list_objects_v2(Bucket=bucket.name)
    return [entry["Key"] for entry in found.get("Contents", [])]


def body(bucket: Bucket, key: str) -> bytes:
    """Return an object's bytes."""
    data: bytes = bucket.server.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    return data


def index(bucket: Bucket, prefix: str = "train/") -> list[dict[str, Any]]:
    """Return the rows of an index, after checking each against the object that it names."""
    rows: list[dict[str, Any]] = json.loads(body(bucket, f"{prefix}index.json"))["shardlist"]
    for row in rows:
        head = bucket.server.client.head_object(Bucket=bucket.name, Key=prefix + row["url"])
        assert (row["filesize"], row["etag"]) == (head["ContentLength"], head["ETag"].strip('"'))
        with tarfile.open(fileobj=io.BytesIO(body(bucket, prefix + row["url"]))) as tar:
            assert row["nsamples"] == len({name.partition(".")[0] for name in tar.getnames()})
    return rows


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of a thousand lines."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(1000)))
    return path


def write(lines: Path, url: str, *flags: str, **env: str) -> Any:
    """Run the command with shards of a hundred lines; return how it ended."""
    return shardcache("write", lines, url, "--shard-size", "104000", "--workers", "1", "--json", *flags, env=env)


@pytest.mark.slow
def test_shards_are_uploaded_and_resumed(moto: Bucket, lines: Path, tmp_path: Path) -> None:
    """The index names each with version and count; the same command again uploads what is missing or was replaced."""
    url, drafts = f"{moto.url}/train", tmp_path / "drafts"
    drafts.mkdir()
    ran = write(lines, url, "--workers", "2", TMPDIR=str(drafts))
    assert ran.code == 0 and list(drafts.iterdir()) == [], ran.err
    assert ran.json["index"] == f"{url}/index.json" and ran.json["shards"] == len(index(moto)) == 10
    moto.server.client.delete_object(Bucket=moto.name, Key="train/shard-000003.tar")
    moto.put("train/shard-000004.tar", bytes(len(body(moto, "train/shard-000004.tar"))))
    again = write(lines, url)
    assert again.code == 0 and again.json["written"] == 2 and again.json["kept"] == 8
    assert len(index(moto)) == 10
    lines.write_text("{}\n")
    assert "input:" in write(lines, url).err


@pytest.mark.slow
def test_large_shards_are_uploaded_in_parts(seaweedfs: Bucket) -> None:
    """Of a real server, as whose ETag shows; the index has that version."""
    with ShardWriter(f"{seaweedfs.url}/train/", shard_size_bytes=40 * MIB) as shards:
        for number in range(6):
            shards.write({"__key__": f"{number}", "bin": bytes([number]) * (9 * MIB)})
    rows = index(seaweedfs)
    assert [row["nsamples"] for row in rows] == [4, 2] and "-" in rows[0]["etag"]


@pytest.mark.slow
def test_an_upload_is_repeated_after_errors(moto: Bucket, lines: Path) -> None:
    """503, 500 and resets cost attempts, not shards."""
    with FaultyProxy(moto.server.endpoint_url) as proxy:
        for number, mischief in enumerate((Mischief.SLOW_DOWN, Mischief.INTERNAL_ERROR, Mischief.RESET_AT_ONCE)):
            proxy.fail(mischief, method="PUT", key=f"train/shard-{number:06d}.tar", times=2)
        ran = write(lines, f"{moto.url}/train", AWS_ENDPOINT_URL=proxy.endpoint_url)
        assert ran.code == 0, ran.err
        assert proxy.done.total() == 6
    assert len(index(moto)) == 10


def test_errors_of_a_destination_advise_its_writer(lines: Path) -> None:
    """Without credentials or a package: what this user needs, and no word of a daemon, which takes no part."""
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    ran = write(lines, "s3://bucket/train", **nothing)
    assert "no usable credentials" in ran.err and "AWS_PROFILE" in ran.err
    missing = write(lines, "oss://bucket/train")
    assert "pip install ossfs" in missing.err
    assert "daemon" not in ran.err + missing.err


def test_a_program_writes_shards(moto: Bucket) -> None:
    """Samples of any members; the same samples give the same bytes, and the index comes last."""
    samples = random_samples(50, {"jpg": 3000, "cls": 1})
    for prefix in ("train", "again"):
        with ShardWriter(f"{moto.url}/{prefix}/", shard_size_bytes=50_000, names="a-%03d.tar") as shards:
            for number, sample in enumerate(samples):
                shards.write({**sample, "json": {"number": number}, "__url__": "from elsewhere"})
            assert f"{prefix}/index.json" not in keys(moto)
    first = index(moto)
    assert [row["url"] for row in first[:2]] == ["a-000.tar", "a-001.tar"]
    assert [row["etag"] for row in first] == [row["etag"] for row in index(moto, "again/")]
    assert sum(row["nsamples"] for row in first) == 50


def test_a_block_that_raises_leaves_no_index(moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the shard at hand, nor anything on the disk; the destination is then refused, so that nothing mixes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def broken(url: str) -> None:
        with ShardWriter(url, shard_size_bytes=50_000) as shards:
            for sample in random_samples(35, {"bin": 3000}):
                shards.write(sample)
            raise RuntimeError("the program's own")

    for url in (f"{moto.url}/train/", str(tmp_path / "out")):
        with pytest.raises(RuntimeError, match="own"):
            broken(url)
        with pytest.raises(ConfigError, match="already holds"):
            broken(url)
    assert keys(moto) == ["train/shard-000000.tar", "train/shard-000001.tar"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shard-000000.tar", "shard-000001.tar"]
    assert not list(tmp_path.glob("shardcache-*"))


def test_unwritable_destinations_are_refused(moto: Bucket, tmp_path: Path) -> None:
    """Two samples in succession with one key, a bucket that does not exist, a web server, a size of nothing."""
    with pytest.raises(SampleError, match="succession"), ShardWriter(tmp_path / "out") as shards:
        shards.write({"__key__": "1", "txt": "a"})
        shards.write({"__key__": "1", "jpg": b""})
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(NotFoundError), ShardWriter("s3://no-such-bucket-here/train/"):
        pass
    with pytest.raises(ConfigError, match="only be read"):
        ShardWriter("https://example.com/train/")
    with pytest.raises(ConfigError, match="positive"):
        ShardWriter(tmp_path / "out", shard_size_bytes=0)
    with pytest.raises(ConfigError, match="not open"):
        shards.write({"__key__": "2", "txt": "a"})


def test_a_block_without_samples_leaves_no_index(tmp_path: Path) -> None:
    """Readers would refuse it as a url that matches nothing, which says nothing of the cause."""
    with pytest.raises(ConfigError, match="no sample was written"), ShardWriter(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_text_that_has_no_bytes_in_utf_8_is_refused(tmp_path: Path) -> None:
    """Half a surrogate pair, as of a file name: it would be read back as another text, or not at all."""
    with pytest.raises(SampleError, match="surrogates not allowed"), ShardWriter(tmp_path / "out") as shards:
        shards.write({"__key__": "1", "txt": "a\udc80"})


def test_a_failed_upload_reaches_the_program(moto: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a later sample or at the end, and no index is written."""
    url = f"{moto.url}/train/"
    with FaultyProxy(moto.server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        proxy.fail(Mischief.FORBIDDEN, method="PUT", key="train/shard-000000.tar")
        with pytest.raises(AccessDeniedError) as caught, ShardWriter(url, shard_size_bytes=9_000) as shards:
            for sample in random_samples(40, {"bin": 3000}):
                shards.write(sample)
    assert caught.value.url == f"{url}shard-000000.tar"
    assert "train/index.json" not in keys(moto)


class HalfMemory(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem whose files grow as they are written, and which fails at half of each shard."""

    protocol = "halfmemory"

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Write half of it."""
        data = Path(lpath).read_bytes()
        self.pipe_file(rpath, data[: len(data) // 2])
        raise OSError("the connection was lost")


def test_any_filesystem_of_fsspec_is_written_to() -> None:
    """Where files grow as they are written, they do so under another name: half a shard is never seen."""
    fsspec.register_implementation("halfmemory", HalfMemory, clobber=True)
    memory = fsspec.filesystem("memory")
    with pytest.raises(OriginUnavailableError, match="lost"), ShardWriter("halfmemory://half/train") as shards:
        shards.write({"__key__": "1", "txt": "a"})
    left = [path.rpartition("/")[2] for path in MemoryFileSystem.store if "half/train/" in path]
    assert left == [".shard-000000.tar.part"]
    with ShardWriter("memory://written/train") as shards:
        for sample in random_samples(20):
            shards.write(sample)
    names = sorted(path.rpartition("/")[2] for path in memory.find("/written/train"))
    assert names == ["index.json", "index.samples", "shard-000000.tar"]
    with tarfile.open(fileobj=io.BytesIO(memory.cat_file("/written/train/shard-000000.tar"))) as tar:
        assert tar.getnames() == [f"{number:06d}.{name}" for number in range(20) for name in ("jpg", "cls")]
