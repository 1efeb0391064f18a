"""The words of errors and messages: without secrets, and with a remedy."""
