"""Chunks of MosaicML Streaming (MDS) and LitData: a count, offsets, and samples with columns."""
