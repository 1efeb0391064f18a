"""Fuzzing of all that reads foreign bytes: `python -m fuzz TARGET CORPUS… -runs=N`, guided by coverage."""
