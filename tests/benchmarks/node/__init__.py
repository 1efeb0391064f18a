"""Benchmarks of one daemon with many shards and readers."""
