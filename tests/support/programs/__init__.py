"""The daemon, the commands and other processes of a test."""
