"""What reads bytes from elsewhere, given any bytes: `python -m fuzz TARGET CORPUS… -runs=N`, guided by coverage."""
