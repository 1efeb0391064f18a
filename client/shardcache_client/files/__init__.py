"""Whole files and ranges of files through the node's daemon, without samples."""
