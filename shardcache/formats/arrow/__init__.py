"""Rows read by Arrow's library and cached as streams of its record batches, such as parquet's."""
