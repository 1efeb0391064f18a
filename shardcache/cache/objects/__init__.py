"""Objects and their bytes for those who have no plan: they ask for one object after another."""
