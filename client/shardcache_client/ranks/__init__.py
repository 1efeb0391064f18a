"""This process's rank, and agreement among all ranks."""
