"""Addresses, names, certificates, and servers of any protocol."""
