"""Credentials in the environment: which each session hands over, and which reach object stores."""
