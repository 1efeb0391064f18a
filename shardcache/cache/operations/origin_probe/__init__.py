"""Origin probe: tests access to object stores with the caller's own credentials and reports findings."""
