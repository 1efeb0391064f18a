"""The cache folder: where its files lie, who may write them, and what is found in it."""
