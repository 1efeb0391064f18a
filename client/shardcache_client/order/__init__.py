"""Each reader's samples and their order: a pure function of manifest, seed, epoch and topology."""
