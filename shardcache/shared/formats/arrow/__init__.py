"""Rows that Arrow's library reads, such as parquet's, cached as streams of record batches."""
