"""Credentials in the environment, those that sessions hand over among them."""
