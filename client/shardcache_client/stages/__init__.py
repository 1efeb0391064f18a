"""Stages of a dataset: decoding, functions on single samples, and what makes groups of several."""
