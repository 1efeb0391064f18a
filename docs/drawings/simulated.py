"""Computes what pages show of `shardcache simulate`: `python docs/drawings/simulated.py [FOLDER]`, in some minutes.

It draws hit-rates.svg, and writes the table of tier.md: in docs, or both files in FOLDER.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef

DOCS = Path(__file__).parents[1]
TABLE = re.compile(r"(?<=<!--simulated-->\n).*?(?=\n<!--end-->)", re.DOTALL)

PART_BYTES = 8 << 20
CLUSTER_SHARDS, CLUSTER_SHARD_BYTES, CLUSTER_NODES, EPOCHS = 8_192, 256 << 20, 64, 10
CLUSTER = f"--nodes {CLUSTER_NODES} --ranks 16 --workers 1 --epochs {EPOCHS} --shuffle-window 16"
PER_GB, PER_1000_REQUESTS = 0.02, 0.0004
CONFIG = f"""[[origin]]
match = "s3://"
price_per_gb = {PER_GB}
price_per_1000_requests = {PER_1000_REQUESTS}
"""


def simulate(folder: Path, shards: int, shard_bytes: int, options: str) -> dict[str, Any]:
    """Simulate a run over shards of 1,000 samples each; return its figures."""
    index = folder / "index.json"
    refs = [ShardRef(f"s3://training/{number:06d}.tar", "v", shard_bytes, 1_000) for number in range(shards)]
    index.write_text(shardlist.write(refs))
    config = folder / "shardcache.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "shardcache", "simulate", str(index), "--json", *options.split()]
    environment = {**os.environ, "SHARDCACHE_CONFIG": str(config)}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def row(name: str, disk: str, store_bytes: float, requests: int, cost: float, between_bytes: float = 0) -> str:
    """Return a row of the table."""
    between = f"{between_bytes / 1e12:.1f} TB" if between_bytes else ""
    return f"|{name}|{disk}|{store_bytes / 1e12:.1f} TB|{requests / 1e6:.2f} M|${cost:,.0f}|{between}|"


def simulated_row(folder: Path, name: str, options: str) -> str:
    """Simulate the cluster with further options; return the row of its table."""
    found = simulate(folder, CLUSTER_SHARDS, CLUSTER_SHARD_BYTES, f"{CLUSTER} {options}")
    disks = [found["disk_bytes"], found["tier_disk_bytes"]]
    disk = " + ".join(f"{size_bytes / 1e9:.0f}" for size_bytes in disks if size_bytes)
    ours = found["policies"]["shardcache"]
    figures = (ours[key] for key in ("store_bytes", "requests", "cost", "between_nodes_bytes"))
    return row(name, f"{disk} GB", *figures)


def warmed_row() -> str:
    """Return the row of nodes that have fetched the whole dataset before a run that fetches nothing."""
    whole_bytes = CLUSTER_SHARDS * CLUSTER_SHARD_BYTES
    of_a_shard = CLUSTER_SHARD_BYTES // PART_BYTES + 1  # its parts, and its version
    reads = EPOCHS * CLUSTER_SHARDS  # each asks for the version; the 1,024 ranks read 8 whole shards each
    requests = CLUSTER_NODES * CLUSTER_SHARDS * of_a_shard + reads
    cost = CLUSTER_NODES * whole_bytes / 1e9 * PER_GB + requests / 1e3 * PER_1000_REQUESTS
    disk = f"{whole_bytes / 1e9:,.0f} GB"
    return row("the whole dataset", disk, CLUSTER_NODES * whole_bytes, requests, cost)


def draw_hit_rates(folder: Path, picture: Path) -> None:
    """Draw the hit rates of two jobs over the cache."""
    jobs = f"--disk 210MB --jobs 2 --epochs 6 --ranks 1 --workers 1 --shuffle-window 4 --picture {picture}"
    simulate(folder, 100, 4 << 20, jobs)


def tier_page(folder: Path) -> str:
    """Return docs/tier.md with the table as it is computed now."""
    rows = [
        simulated_row(folder, "its part, `canonical_nodes`", f"--disk 40GB --canonical-nodes {CLUSTER_NODES}"),
        simulated_row(folder, "the cluster's, with a tier", "--disk 43GB --tier"),
        warmed_row(),
    ]
    head = "|each node's disk holds|disk|bytes|requests|cost|between nodes|\n|---|---|---|---|---|---|\n"
    table = "\n" + head + "\n".join(rows) + "\n"
    return TABLE.sub(table, (DOCS / "tier.md").read_text())


def main() -> None:
    """Draw the picture, and write the table."""
    pictures, pages = DOCS / "pictures", DOCS
    if sys.argv[1:]:
        pictures = pages = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_hit_rates(folder, pictures / "hit-rates.svg")
        page = tier_page(folder)
    (pages / "tier.md").write_text(page)


if __name__ == "__main__":
    main()
