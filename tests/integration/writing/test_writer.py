"""writing/writer.py: `ShardWriter`, which writes a program's samples to a folder or store."""

import io
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginUnavailableError,
    SampleError,
    TokensError,
)
from shardcache.writing import ShardWriter
from support.shards.tars import random_samples
from support.stores.buckets import Bucket, index_of, keys_of
from support.stores.faulty_proxy import FaultyProxy
from support.stores.mischief import Mischief

MIB = 1024**2


def test_a_program_writes_shards(moto: Bucket) -> None:
    """Samples of any members; the same samples give the same bytes, and the index comes last."""
    samples = random_samples(50, {"jpg": 3000, "cls": 1})
    for prefix in ("train", "again"):
        with ShardWriter(
            f"{moto.url}/{prefix}/", shard_size_bytes=50_000, names="a-%03d.tar"
        ) as shards:
            for number, sample in enumerate(samples):
                shards.write({**sample, "json": {"number": number}, "__url__": "from elsewhere"})
            assert f"{prefix}/index.json" not in keys_of(moto)
    first = index_of(moto)
    assert [row["url"] for row in first[:2]] == ["a-000.tar", "a-001.tar"]
    assert [row["etag"] for row in first] == [row["etag"] for row in index_of(moto, "again/")]
    assert sum(row["nsamples"] for row in first) == 50


@pytest.mark.slow
def test_large_shards_are_uploaded_in_parts(seaweedfs: Bucket) -> None:
    """Of a real server, as whose ETag shows; the index has that version."""
    with ShardWriter(f"{seaweedfs.url}/train/", shard_size_bytes=40 * MIB) as shards:
        for number in range(6):
            shards.write({"__key__": f"{number}", "bin": bytes([number]) * (9 * MIB)})
    rows = index_of(seaweedfs)
    assert [row["nsamples"] for row in rows] == [4, 2]
    assert "-" in rows[0]["etag"]


@pytest.mark.slow
def test_a_block_that_raises_leaves_no_index(
    moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shard at hand or other file is left, and the destination is then refused."""
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
    assert keys_of(moto) == ["train/shard-000000.tar", "train/shard-000001.tar"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "shard-000000.tar",
        "shard-000001.tar",
    ]
    assert not list(tmp_path.glob("shardcache-*"))


def test_an_empty_destination_is_refused() -> None:
    """As of a variable that is not set; it would be the root of the file system."""
    with pytest.raises(ConfigError, match="destination is empty"):
        ShardWriter("")


def test_a_sample_whose_tokens_are_refused_can_be_corrected(tmp_path: Path) -> None:
    """Nothing of the refused sample is in the shard, not even its key."""
    with ShardWriter(tmp_path / "out", tokens="npy") as shards:
        with pytest.raises(TokensError):
            shards.write({"__key__": "1", "npy": b"no array"})
        shards.write({"__key__": "1", "npy": [1, 2, 3]})
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        assert tar.getnames() == ["1.npy"]


@pytest.mark.parametrize("protocol", ["file", "FILE", "local"])
def test_a_destination_may_be_the_url_of_a_folder(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name of the protocol works, and nothing goes to the working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with ShardWriter(f"{protocol}://{tmp_path}/out/") as shards:
        shards.write({"__key__": "a", "txt": "a"})
    assert (tmp_path / "out" / "index.json").exists()
    assert not list(work.iterdir())


def test_a_refused_sample_leaves_no_empty_shard(tmp_path: Path) -> None:
    """Neither as the only sample, nor as the first of a further shard."""
    refused = {"__key__": "2", "npy": b"no array"}
    none = ShardWriter(tmp_path / "none", tokens="npy")
    none.__enter__()
    with pytest.raises(TokensError):
        none.write(refused)
    with pytest.raises(ConfigError, match="no samples were written"):
        none.__exit__(None, None, None)
    with ShardWriter(tmp_path / "out", shard_size_bytes=3000, tokens="npy") as shards:
        shards.write({"__key__": "1", "npy": [1, 2, 3]})
        with pytest.raises(TokensError):
            shards.write({**refused, "bin": bytes(3000)})
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["shard-000000.tar"]


def test_a_block_without_samples_leaves_no_index(tmp_path: Path) -> None:
    """Readers would refuse it as a url that matches nothing, which says nothing of the cause."""
    with pytest.raises(ConfigError, match="no samples were written"), ShardWriter(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_unwritable_destinations_are_refused(moto: Bucket, tmp_path: Path) -> None:
    """A repeated key, a missing bucket, a web server and a size of nothing are refused."""
    with pytest.raises(SampleError, match="consecutive"), ShardWriter(tmp_path / "out") as shards:
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


def test_writer_refuses_a_key_that_comes_again_with_other_members(tmp_path: Path) -> None:
    """Readers would refuse the shard, though the members make another sample of that key."""
    with ShardWriter(tmp_path / "same") as shards:
        for key in "aba":
            shards.write({"__key__": key, "txt": key})
    with (
        pytest.raises(SampleError, match="have the key 'a'"),
        ShardWriter(tmp_path / "other") as shards,
    ):
        for key, extension in (("a", "txt"), ("b", "txt"), ("a", "json")):
            shards.write({"__key__": key, extension: key})
    assert not list((tmp_path / "other").glob("*.tar"))


def test_text_that_has_no_bytes_in_utf_8_is_refused(tmp_path: Path) -> None:
    """Half a surrogate pair would be read back as another text, or not at all."""
    with (
        pytest.raises(SampleError, match="surrogates not allowed"),
        ShardWriter(tmp_path / "out") as shards,
    ):
        shards.write({"__key__": "1", "txt": "a\udc80"})


def test_a_failed_upload_reaches_the_program(moto: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a later sample or at the end, and no index is written."""
    url = f"{moto.url}/train/"
    with FaultyProxy(moto.server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        proxy.fail(Mischief.FORBIDDEN, method="PUT", key="train/shard-000000.tar")
        with (
            pytest.raises(AccessDeniedError) as caught,
            ShardWriter(url, shard_size_bytes=9_000) as shards,
        ):
            for sample in random_samples(40, {"bin": 3000}):
                shards.write(sample)
    assert caught.value.url == f"{url}shard-000000.tar"
    assert "train/index.json" not in keys_of(moto)


def test_each_write_after_a_failed_upload_raises_its_error(
    moto: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the block raises it, too, and no index is written."""
    url = f"{moto.url}/train/"
    large = random_samples(40, {"bin": 3000})
    small = random_samples(5, {"bin": 1})
    with FaultyProxy(moto.server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        proxy.fail(Mischief.FORBIDDEN, method="PUT", key="train/shard-000001.tar")
        with (
            pytest.raises(AccessDeniedError) as at_end,
            ShardWriter(url, shard_size_bytes=9_000) as shards,
        ):
            with pytest.raises(AccessDeniedError):
                for sample in large:
                    shards.write(sample)
            for sample in (*large, *small):
                with pytest.raises(AccessDeniedError) as caught:
                    shards.write(sample)
                assert caught.value.url == f"{url}shard-000001.tar"
    assert at_end.value.url == f"{url}shard-000001.tar"
    assert "train/index.json" not in keys_of(moto)


class HalfMemory(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem whose files grow as they are written, and which fails at half of each shard."""

    protocol = "halfmemory"

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Write half of the file, then fail."""
        data = Path(lpath).read_bytes()
        self.pipe_file(rpath, data[: len(data) // 2])
        raise OSError("the connection was lost")


@pytest.mark.slow
def test_any_filesystem_of_fsspec_is_written_to() -> None:
    """Files that grow as they are written have another name, so no half shard is seen."""
    fsspec.register_implementation("halfmemory", HalfMemory, clobber=True)
    memory = fsspec.filesystem("memory")
    with (
        pytest.raises(OriginUnavailableError, match="lost"),
        ShardWriter("halfmemory://half/train") as shards,
    ):
        shards.write({"__key__": "1", "txt": "a"})
    left = [path.rpartition("/")[2] for path in MemoryFileSystem.store if "half/train/" in path]
    assert left == [".shard-000000.tar.part"]
    with ShardWriter("memory://written/train") as shards:
        for sample in random_samples(20):
            shards.write(sample)
    names = sorted(path.rpartition("/")[2] for path in memory.find("/written/train"))
    assert names == ["index.json", "index.samples", "shard-000000.tar"]
    with tarfile.open(
        fileobj=io.BytesIO(memory.cat_file("/written/train/shard-000000.tar"))
    ) as tar:
        assert tar.getnames() == [
            f"{number:06d}.{name}" for number in range(20) for name in ("jpg", "cls")
        ]
