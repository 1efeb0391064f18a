"""Benchmarks of downloads, cold epochs and clusters."""
