"""Batches of bounded size of samples of any length, equally many on every rank."""
