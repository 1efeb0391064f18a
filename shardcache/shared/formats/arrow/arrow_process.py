"""The helper process in which Arrow's library turns a file into a stream of rows.

`parquet_program` is the program of the process. A format's `stored_copy` returns the output of the
process as a stream, which the cache stores.
"""

import importlib.util
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.shared.exceptions import CorruptShardError, MissingPackageError

# The module's name is written out: importing it here would import pyarrow into the daemon.
_PROGRAM = "shardcache.shared.formats.arrow.parquet_program"
_SHOWN_BYTES = 1000  # maximum length of the reason that the process gives for a failure
_BUFFER_BYTES = 1024 * 1024  # number of bytes that are read from the process at a time


def rows_of(file_kind: str, path: Path, url: str, span: tuple[int, int] | None = None) -> BinaryIO:
    """Return the stream of rows of a file. Raises OSError; MissingPackageError without pyarrow.

    Args:
        file_kind: kind of the file in errors, such as "parquet file".
        path: path of the file.
        url: url of the file, for errors.
        span: start and end of the Arrow file that lies in the file; None for a parquet file.
    """
    output = _ArrowProcess(file_kind, path, url, span)
    return io.BufferedReader(output, _BUFFER_BYTES)


class _ArrowProcess(io.RawIOBase):
    """The output of the process as a raw stream. Closing the stream ends the process.

    A read raises CorruptShardError if Arrow's library cannot read the file.
    """

    def __init__(self, file_kind: str, path: Path, url: str, span: tuple[int, int] | None) -> None:
        """Start the process; the arguments are those of `rows_of`."""
        super().__init__()
        if importlib.util.find_spec("pyarrow") is None:
            raise MissingPackageError(
                f"reading a {file_kind} needs the Python package pyarrow in the daemon's "
                "environment",
                url=url,
                remedy="pip install 'shardcache[parquet]', and restart the daemon",
            )
        self._file_kind = file_kind
        self._url = url
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        # -P keeps the working directory out of the import path. In a session of its own, the
        # process gets no signal that is sent to the daemon's process group, such as by Ctrl-C.
        command = (sys.executable, "-P", "-m", _PROGRAM, str(path), *map(str, span or ()))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some of the process's output. Raises CorruptShardError."""
        assert self._process.stdout is not None
        count: int = self._process.stdout.readinto(buffer)  # type: ignore[attr-defined]
        # Reading nothing into a buffer that has space means the end of the output. The output is
        # complete only if the process has succeeded.
        is_end = count == 0 and len(buffer) > 0
        if is_end:
            self._check_success()
        return count

    def _check_success(self) -> None:
        """Wait for the process to end. Raises CorruptShardError if it failed."""
        status = self._process.wait()
        if not status:
            return
        self._stderr.seek(0)
        lines = self._stderr.read(_SHOWN_BYTES).decode(errors="replace").splitlines()
        reason = lines[0] if lines else f"its decoder ended with status {status}"
        raise CorruptShardError(
            f"the {self._file_kind} cannot be read: {reason}",
            url=self._url,
            remedy="check that the library that wrote the file reads it, then write and upload it "
            "again",
        )

    def close(self) -> None:
        """End the process."""
        if not self.closed:
            assert self._process.stdout is not None
            self._process.kill()
            self._process.stdout.close()
            self._process.wait()
            self._stderr.close()
        super().close()
