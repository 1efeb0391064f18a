"""Ratios against the tools that people use today, each measured in one run: `make bench`."""
