"""Breaks everything on purpose, many times: `make faults`. tests/faults has short rounds."""
