"""Meanings of urls, and rules of the urls that a user may request."""
