"""Batches by number: the samples at a batch's places are read, decoded and collated.

Any thread or worker process can make any batch, since a batch's number determines its places.
"""
