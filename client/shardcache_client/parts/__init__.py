"""Parts of a dataset: its shards, samples and epochs, and the program that reads them.

`reader`, `dataset`, `loading` and `mixing` build their public classes on these modules.
"""
