"""Benchmarks of reading and of the order of samples."""
