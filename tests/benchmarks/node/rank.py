"""`python -m benchmarks.node.rank INDEX SOCKET FOLDER RANK READERS`: readers of one rank of 64.

It imports what a training script without torch does, and begins once the folder has a file `go`.
Each reader writes how long its dataset and first sample took, and stays until there is a file
`end`.
"""

import json
import os
import sys
import time
from pathlib import Path

from shardcache_client.reader import ShardReader

READERS = 64

if __name__ == "__main__":
    index = sys.argv[1]
    socket = sys.argv[2]
    folder = Path(sys.argv[3])
    rank = int(sys.argv[4])
    readers = int(sys.argv[5])
    (folder / f"{rank}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    begun_s = time.time()
    reader = ShardReader(index, shuffle=True, socket=socket, daemon="node", job="scale")
    made_s = time.time() - begun_s
    for number in range(rank * readers, (rank + 1) * readers):
        if not os.fork():
            os.environ |= {"RANK": str(number % READERS), "WORLD_SIZE": str(READERS)}
            samples = iter(reader)
            next(samples)
            peak = next(
                line
                for line in Path("/proc/self/status").read_text().splitlines()
                if "VmHWM" in line
            )
            first = {"made_s": made_s, "at_s": time.time(), "first_s": time.time() - begun_s}
            (folder / f".{number}").write_text(
                json.dumps(first | {"bytes": int(peak.split()[1]) * 1024})
            )
            (folder / f".{number}").rename(folder / f"{number}.json")
            while not (folder / "end").exists():
                time.sleep(0.1)
            os._exit(0)
    for _ in range(readers):
        os.wait()
