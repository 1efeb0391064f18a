"""Urls as daemon and client name objects: local paths, signatures, suffixes."""
