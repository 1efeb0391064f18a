"""This process's rank in its job, and agreement among all ranks."""
