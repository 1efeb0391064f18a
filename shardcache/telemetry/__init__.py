"""The daemon's log, its counters and its histograms."""
