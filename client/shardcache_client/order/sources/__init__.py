"""Sources of a mixture: their weights, and how a change leaves them."""
