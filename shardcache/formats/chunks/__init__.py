"""Chunks of MosaicML Streaming (MDS) and LitData: a count and offsets, then samples of columns."""
