"""Object stores that the transport workers read by HTTP as documented.

They are Google's, Azure's and the Hugging Face Hub. A store's fsspec filesystem lists, uploads and
finds the credentials; no byte of a shard passes through it.
"""
