"""Logs, metrics and traces of the daemon, with secrets redacted."""
