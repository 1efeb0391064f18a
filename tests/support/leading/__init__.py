"""A folder for `PYTHONPATH`, see `support.lead`."""
