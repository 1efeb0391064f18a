"""Stages that make something else of a rank's samples than one item each: batches by length, blocks of tokens."""
