"""Which rank this is, and what all ranks have to agree on."""
