"""The formats that shards are made from: folders of files, parquet, Hugging Face's datasets, JSONL."""
