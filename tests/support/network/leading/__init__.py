"""A folder for `PYTHONPATH`, see `support.network.lead`."""
