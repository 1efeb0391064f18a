"""Connection slots, priorities and bandwidth: the next request to run, and the ones to pause for it."""
