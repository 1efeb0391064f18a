"""Samples: sliced from mapped shards, viewed in part, decoded."""
