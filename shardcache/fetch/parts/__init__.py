"""Requests for parts: limits of time, pausing, hedging."""
