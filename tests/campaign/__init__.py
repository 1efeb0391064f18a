"""Breaks everything on purpose, many times over: `make faults`. A short round of each part runs in tests/faults."""
