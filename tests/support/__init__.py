"""Servers and helpers that several tests share."""
