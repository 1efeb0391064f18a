"""Who reads which samples in which order: a pure function of manifest, seed, epoch and topology."""
