"""Names of arguments in other libraries, with a remedy for users who write these names.

Functions that check their arguments (see `values.checked`) give the remedy in the error about an
argument that does not exist.

Remedies name methods of datasets: `.loader(...)` makes a loader, and `.indexed()` a map-style
dataset, which torch's DataLoader reads by the samples' numbers. If a word may mean an option either
of the dataset or of its loader, the remedy names both: the loader's comes after "of a loader:".
"""


def _words(*rows: tuple[str, str]) -> dict[str, str]:
    """Return remedies by word.

    Args:
        rows: each has some words, separated by spaces, and the remedy for all of them. In a remedy,
            `{}` stands for the word.
    """
    return {word: remedy for words, remedy in rows for word in words.split()}


OTHER_WORDS = _words(
    (
        "drop_last",
        'write even="drop", for ranks of equal length; of a loader: .loader(drop_last=True)',
    ),
    (
        "num_workers workers pin_memory prefetch_factor persistent_workers collate_fn collate "
        "worker_init_fn in_order multiprocessing_context",
        "give it to the loader: .loader({}=...)",
    ),
    ("sampler batch_sampler", "give it to a DataLoader of .indexed(), which has samples by number"),
    ("generator random_seed shuffle_seed base_seed", "write seed=..."),
    (
        "transform transforms target_transform preprocess map map_fn",
        "write .map(function) after it",
    ),
    (
        "filter filter_fn predicate",
        "write .filter(function) after it; or .select(), which uses the index",
    ),
    (
        "shuffle_buffer shuffle_buffer_size buffer_size bufsize shuffle_size shuffle_block_size "
        "shuffle_algo initial shardshuffle shuffle_shards detshuffle",
        "write shuffle=True, shuffle_window=8, which mixes the samples of that many shards",
    ),
    ("num_canonical_nodes", "write canonical_nodes=..."),
    ("epoch_size epoch_length with_epoch length num_samples size", "write samples_per_epoch=..."),
    ("num_epochs n_epochs max_epochs repeat repeats", "write epochs=..."),
    ("epoch initial_epoch start_epoch", "call .set_epoch({})"),
    ("resampled", "write samples_per_epoch=..., and shuffle=True"),
    ("device_mesh dp_mesh process_group group dp_group", "write mesh=..."),
    ("num_replicas num_shards num_processes", "write world_size=..."),
    ("local_rank shard_id process_index process_id", "write rank=..., with world_size=..."),
    (
        "nodesplitter workersplitter splitter split_by_node split_by_worker",
        "omit it: ranks and workers have shares",
    ),
    ("handler error_handler on_exception", "write on_error=..."),
    ("columns select_files fields features", 'write members=("jpg", "cls")'),
    ("image_decoder imagehandler decoder", "write decode=..."),
    (
        "remote local input_dir data_dir data_files path paths url shards root folder bucket",
        "write urls=...",
    ),
    ("split subset subsample", "write .{}(...) after it; or name its shards in urls"),
    (
        "streams datasets proportion proportions probabilities weights",
        "write Mixture({{name: dataset}}, weights=...)",
    ),
    ("item_loader block_size context_length seq_len", "write tokens=TokenBlocks(length)"),
    (
        "cache_dir cache_size cache_limit max_cache_size cache_url local_dir",
        "omit it: the daemon has the cache; shardcache serve --cache-dir DIR --capacity SIZE",
    ),
    (
        "predownload prefetch max_pre_download download_retry keep_zip keep_raw validate_hash "
        "verify streaming empty_check num_threads",
        "omit it: the daemon prefetches, retries and verifies",
    ),
    (
        "timeout download_timeout timeout_positive",
        "write timeout_s=...; of a loader: .loader(timeout=...)",
    ),
    (
        "storage_options endpoint_url token profile credentials region anon s3_client fs "
        "filesystem",
        'write it into the daemon\'s config file: [[origin]], then match = "s3://bucket/" and '
        "the option",
    ),
)
"""Remedies by the names that arguments have in other libraries.

The libraries are DataLoader, webdataset, MosaicML Streaming, LitData and datasets.
"""
