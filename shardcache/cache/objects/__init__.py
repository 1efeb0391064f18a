"""Objects and their bytes, for clients without a plan that request one object after another."""
