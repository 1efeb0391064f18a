"""Stages of a dataset: decoding, functions on single samples, and grouping of several samples."""
