"""Bytes of files for S3 clients."""

import tempfile
from contextlib import closing
from pathlib import Path

from shardcache.server.s3.sending import Sender
from shardcache.store.disk.mounts import mount_of

MEMORY = Path("/dev/shm")


def test_bytes_of_a_cache_in_memory_are_read_from_memory() -> None:
    """Its filesystem refuses the flag by which others say that a read would wait for the disk."""
    is_memory = mount_of(MEMORY).is_memory
    with (
        tempfile.TemporaryFile(dir=MEMORY) as file,
        closing(Sender(1.0, is_memory=is_memory)) as sender,
    ):
        file.write(b"0123456789")
        file.flush()
        assert sender.read_from_memory(file.fileno(), 2, 3) == b"234"


def test_bytes_beyond_the_end_of_a_file_are_not_made_up() -> None:
    with tempfile.TemporaryFile(dir=MEMORY) as file, closing(Sender(1.0, is_memory=True)) as sender:
        file.write(b"0123456789")
        file.flush()
        assert sender.read_from_memory(file.fileno(), 8, 3) is None
