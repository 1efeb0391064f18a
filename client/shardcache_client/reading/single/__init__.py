"""Samples read one by one: their ranges of tars, and readers of these."""
