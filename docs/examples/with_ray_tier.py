"""Ray with a tier: an actor per node runs nginx, so that the object store sends each shard once for all nodes.

python with_ray_tier.py 's3://bucket/train-{000000..000999}.tar' --store https://s3.eu-central-1.amazonaws.com \\
    --cache-dir /mnt/nvme/shardcache --capacity 500GB --tier-dir /mnt/nvme/tier --run-dir /dev/shm/tier --max-size 2TiB

Every node needs nginx and `shardcache[cluster,ray]`. Further options, such as --max-size, are those of
`shardcache cluster run`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shardcache_client.ray import read_shards, start_daemons


@ray.remote(num_cpus=0)
class NodeTier:
    """nginx of one node, which ends with this actor."""

    def __init__(self, options: list[str], certificates: dict[str, bytes], run_dir: str, front: str) -> None:
        node = ray.get_runtime_context().get_node_id()
        folder = Path(run_dir.replace("{node}", node))
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in certificates.items():
            (folder / name).unlink(missing_ok=True)
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        files = [f"--ca={folder / 'ca.pem'}", f"--certificate={folder / 'node.pem'}", f"--key={folder / 'node.key'}"]
        self._front = front.replace("{address}", ray.util.get_node_ip_address())
        where = ["--node", node, "--run-dir", str(folder), "--front", self._front]
        # The tether has the kernel end the command with this actor's process, even if that is killed.
        command = [sys.executable, "-m", "shardcache_client.ray.tether", str(os.getpid()), "cluster", "run"]
        self._process = subprocess.Popen([*command, *where, *files, *options])

    def front(self) -> str:
        """Return the address that serves this node's daemon, as soon as it answers."""
        host, port = self._front.rsplit(":", 1)
        while self._process.poll() is None:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return self._front
            time.sleep(0.1)
        raise RuntimeError(f"the tier ended with status {self._process.returncode}: see its message above")


def certificates() -> dict[str, bytes]:
    """Return a new certificate for all nodes, with its key and its authority; the authority's key is forgotten."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardcache", "cluster", "certificates", "--shared", "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return {path.name: path.read_bytes() for path in Path(folder, "shared").iterdir()}


def main() -> None:
    """Read the shards that the command line names, through the tier."""
    parser = argparse.ArgumentParser(epilog="In paths, {node} stands for the Ray node's id.")
    parser.add_argument("urls", help="shards to read")
    parser.add_argument("--store", required=True, help="endpoint of the object store")
    parser.add_argument("--cache-dir", required=True, help="a folder on each node's local disk, for its daemon")
    parser.add_argument("--capacity", required=True, help="of each daemon's cache, such as 500GB")
    parser.add_argument("--socket", help="path of each daemon's socket")
    parser.add_argument(
        "--tier-dir", required=True, help="a folder on each node's local disk, for its part of the tier"
    )
    parser.add_argument("--run-dir", required=True, help="a folder in each node's memory")
    parser.add_argument(
        "--front", default="127.0.0.1:9080", help="where nginx serves its node; {address} is the node's"
    )
    args, options = parser.parse_known_args()
    ray.init()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    options += ["--nodes", ",".join(f"{node}={address}" for node, address in nodes.items())]
    options += ["--store", args.store, "--cache-dir", args.tier_dir]
    shared = certificates()
    tiers = [
        NodeTier.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            options, shared, args.run_dir, args.front
        )
        for node in nodes
    ]
    front, *_ = ray.get([tier.front.remote() for tier in tiers])  # the same everywhere: each node's own loopback
    origin = json.dumps([{"match": "s3://", "tier": front}])
    env = {"SHARDCACHE_ORIGIN": origin}
    start_daemons(cache_dir=args.cache_dir, capacity=args.capacity, socket=args.socket, env=env)
    print(f"{read_shards(args.urls).materialize().count()} samples, read on {len(nodes)} nodes")


if __name__ == "__main__":
    main()
