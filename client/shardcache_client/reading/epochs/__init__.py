"""Readers of an epoch's places, and the plans that they declare."""
