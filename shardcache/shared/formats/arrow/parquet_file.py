"""Parquet files: a row is a sample, and the cache stores a stream of Arrow's record batches.

In a parquet file, values are compressed by thousands. In the stream, each value is a range of
bytes, as a member of a tar is. A helper process makes the stream once, when the file arrives
(`parquet_program`), so that readers need no pyarrow.
"""

from pathlib import Path
from typing import BinaryIO

from shardcache.shared.formats import cell_values
from shardcache.shared.formats.arrow import arrow_rows
from shardcache.shared.formats.arrow.arrow_process import rows_of
from shardcache.shared.formats.format import Decoder, Format, IndexOptions, RunDecoder
from shardcache.shared.tarindex.tables import Samples


class ParquetFormat(Format):
    """Parquet files."""

    name = "parquet"
    suffixes = {".parquet": None}  # noqa: RUF012  # a Mapping
    is_common_outside_datasets = True
    magic = b"PAR1"
    may_repack = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        return arrow_rows.index(path, url)

    def decoder(self, encoding: str) -> Decoder | None:
        """As `Format.decoder`."""
        if encoding in cell_values.DECODERS:
            return cell_values.DECODERS[encoding]
        return super().decoder(encoding)

    def run_decoder(self, encoding: str) -> RunDecoder | None:
        """As `Format.run_decoder`."""
        return cell_values.RUN_DECODERS.get(encoding)

    def stored_copy(self, path: Path, url: str) -> BinaryIO:
        """As `Format.stored_copy`."""
        return rows_of("parquet file", path, url)


PARQUET = ParquetFormat()
