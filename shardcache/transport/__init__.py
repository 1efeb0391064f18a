"""Transport workers, which are processes that move HTTP bodies into files, and the daemon's side.

`worker_pool.Workers` is what the daemon uses; `worker` is the program of a worker.
"""
