"""Object stores that the transport workers read by HTTP as documented.

They are Google's, Azure's and the Hugging Face Hub. A store's fsspec filesystem lists objects,
uploads files and finds the credentials. The bytes that are read do not pass through it.
"""
