"""Samples read one by one: their places in tars, and their ranges."""
