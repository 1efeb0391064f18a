"""Batches by number: what is read at their places, decoded and collated, by whoever is free."""
