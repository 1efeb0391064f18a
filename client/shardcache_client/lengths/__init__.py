"""Batches of bounded size from samples of any length, the same number on every rank."""
