"""The daemon's options: which there are, where each can be set, and where it was."""
