"""The tests of webdataset's suite that are left out or go another way with ours, and why."""

NETWORK = "reads a file of the internet, by webdataset's own cache, which the drop-in does not use"

LEFT_OUT = {
    "test_cache.py::TestStreamingOpen::test_remote_file": NETWORK,
    "test_cache.py::TestFileCache::test_remote_file": NETWORK,
}

FAILS_WITH_WEBDATASET = {
    "test_handlers.py::test_missing_throws2": (
        "where a server has no such shard, webdataset raises a ReadError of tarfile, "
        "which is no IOError"
    ),
}

PIPE = "`pipe:` is refused: the daemon fetches urls, and runs nobody's commands"

EXPECTED_TO_FAIL = {
    "test_compat.py::test_dataset_pipe_cat": PIPE,
    "test_compat.py::test_dataset_eof": PIPE,
    "test_compat.py::test_dataset_eof_handler": PIPE,
    "test_compat.py::test_cache_dir": (
        "the cache is the daemon's: nothing is written to `cache_dir`, and samples of remote "
        "shards have no `__local_path__`, for a file of the cache may go once it was read"
    ),
    "test_loaders.py::test_check_empty_throws_ValueError": (
        "webdataset refuses more workers than shards; here, samples are dealt to the workers, "
        "and each has some"
    ),
}
