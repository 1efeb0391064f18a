"""Whole files and ranges of them through the node's daemon, without samples."""
