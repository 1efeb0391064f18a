"""Transport workers: processes that send HTTP requests and write the answers' bodies to files.

The daemon uses `worker_pool.Workers`; `worker` is the program that each process runs.
"""
