"""The daemon's options: their definitions, and the flags, variables and files that set them."""
