"""Position of a reader in its share of an epoch, and how it resumes from a state.

A state is what `state_dict()` returns and a checkpoint holds. `bookmark` follows the iterations of
a dataset, `progress` says how much of an epoch has been read, and the other modules read and write
states.
"""
