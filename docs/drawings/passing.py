"""Drawings of how shards pass through a node: the node, the choice of the next fetch, a shard's life, and deaths."""

from canvas import Canvas

SHARD_PX = 46
SHARD_HEIGHT_PX = 32
LANE_LEFT_PX = 122
LANE_PX = 32


def node() -> Canvas:
    """Draw the object store, and a node with its daemon, cache and training processes."""
    canvas = Canvas(
        "How shards reach a training process",
        "Bytes go from the object store to the daemon, which writes them to the cache on the node's disk; training "
        "processes map the files. Each reader has one Unix socket to the daemon: it sends its plan, the list of "
        "shards that it will read, and receives leases, which are paths of files.",
        400,
    )
    canvas.box("box", 16, 140, 124, 84, "object store\nS3, GCS, web, …", bold=True)
    canvas.box("group", 168, 16, 536, 368)
    canvas.text(182, 38, "one node", "name")
    canvas.box("ours", 186, 124, 164, 116, "daemon\nhas the credentials,\nfetches ahead,\nverifies, indexes", bold=True)
    canvas.box(
        "here", 318, 282, 200, 84, "cache on the local disk\nwhole, verified shards\nand their indexes", bold=True
    )
    canvas.box("group", 500, 46, 192, 190)
    canvas.text(596, 68, "training processes", "name mid")
    for number, reader in enumerate(("job A, rank 0", "job A, rank 1", "job B, rank 0")):
        canvas.box("box", 512, 80 + 34 * number, 168, 26, reader)
    canvas.text(596, 202, "need no credentials,", "note mid")
    canvas.text(596, 220, "never contact the store", "note mid")

    canvas.path("bytes", "M140 182 H180")
    canvas.path("bytes", "M268 240 C268 300 280 324 312 324")
    canvas.path("bytes", "M518 324 C580 324 596 290 596 242")
    canvas.path("talk", "M500 96 C440 96 400 110 356 146")
    canvas.path("talk", "M350 196 C400 214 440 214 494 200")
    canvas.text(350, 86, "plan: shards to read", "note")
    canvas.text(360, 236, "lease: a file's path", "note")
    canvas.text(536, 344, "mapped, not copied", "note")
    canvas.path("bytes", "M186 338 H212")
    canvas.text(220, 342, "bytes", "note")
    canvas.path("talk", "M186 360 H212")
    canvas.text(220, 364, "messages", "note")
    return canvas


def next_fetch() -> Canvas:
    """Draw the plans of two jobs on one timeline, the shard to fetch and the one to evict."""
    canvas = Canvas(
        "How the next fetch is chosen",
        "The plans of two jobs are put on one timeline, each at its own pace. Of the missing shards, the one needed "
        "soonest is fetched; the cached shard that is needed furthest in the future is evicted to make room for it.",
        384,
    )
    canvas.text(20, 32, "Each job's order is known: it follows from the seed and the epoch.")
    plans = {
        "job A": {
            0: ("here", 3),
            110: ("coming", 1),
            220: ("here", 9),
            330: ("here", 4),
            440: ("here", 5),
            550: ("here", 2),
        },
        "job B": {0: ("here", 7), 176: ("here", 5), 352: ("missing", 8), 528: ("here", 6)},
    }
    for row, (job, shards) in enumerate(plans.items()):
        y = 52 + 44 * row
        canvas.text(20, y + 21, job, "name")
        for time, (kind, shard) in shards.items():
            _shard(canvas, kind, 90 + time, y, shard)
    canvas.path("talk", "M90 146 H696")
    canvas.text(90, 164, "now", "note")
    canvas.text(696, 164, "when each is needed, at each job's own measured pace", "note end")

    canvas.text(20, 206, "All plans on one timeline, by the next use of each shard:")
    timeline = [
        ("here", 3),
        ("here", 7),
        ("coming", 1),
        ("here", 5),
        ("here", 9),
        ("here", 4),
        ("missing", 8),
        ("here", 6),
        ("here", 2),
    ]
    places = {shard: 40 + 70 * number for number, (_, shard) in enumerate(timeline)}
    for kind, shard in timeline:
        _shard(canvas, kind, places[shard], 222, shard)
    canvas.text((places[3] + places[7] + SHARD_PX) / 2, 276, "in use: kept", "note mid")
    canvas.text(places[1] + SHARD_PX / 2, 276, "arriving", "note mid")
    for shard, lines in ((8, ("fetched next: missing,", "needed soonest")), (2, ("evicted: needed", "last of all"))):
        middle = places[shard] + SHARD_PX / 2
        canvas.path("talk", f"M{middle:g} 298 V260")
        canvas.text(middle, 315, lines[0], "note mid")
        canvas.text(middle, 332, lines[1], "note mid")
    for number, (kind, name) in enumerate((("here", "cached"), ("coming", "arriving"), ("missing", "missing"))):
        x = 20 + 120 * number
        canvas.box(kind, x, 352, 16, 16)
        canvas.text(x + 23, 365, name, "note")
    return canvas


def _shard(canvas: Canvas, kind: str, x: float, y: float, number: int) -> None:
    canvas.box(kind, x, y, SHARD_PX, SHARD_HEIGHT_PX, str(number), bold=True)


def life() -> Canvas:
    """Draw what becomes of a shard, from a plan to its eviction."""
    canvas = Canvas(
        "The life of a shard",
        "A shard is planned, gets space in the cache, arrives in parts, is verified and indexed, and is published by a "
        "rename. From then on it is read-only: leased to readers, kept while it will be needed, and evicted in the "
        "end. A shard that fails verification never becomes visible.",
        330,
    )
    steps = [
        ("box", "planned\na job names it"),
        ("box", "space\nreserved before\nthe first byte"),
        ("coming", "parts\nchecked singly,\nsurvive a crash"),
        ("coming", "verified\nthe whole tar,\nand indexed"),
        ("here", "published\nby a rename,\nnever written"),
    ]
    width = 126
    step = 140
    left = 16
    for number, (kind, label) in enumerate(steps):
        x = left + number * step
        canvas.box(kind, x, 48, width, 80, label, bold=True)
        if number:
            canvas.path("talk", f"M{x - step + width} 88 H{x - 2}")
    canvas.text(left, 32, "invisible, except its beginning to a reader that waits for it", "note")
    last = left + 4 * step
    canvas.text(last + width, 32, "visible", "note end")
    canvas.box("ours", last, 200, width, 80, "leased\nmapped by jobs\nuntil released", bold=True)
    canvas.path("talk", f"M{last + 46} 128 V194")
    canvas.path("talk", f"M{last + 78} 200 V134")
    canvas.box("box", 390, 200, 150, 80, "evicted\nneeded later than\nwhat replaces it", bold=True)
    canvas.path("talk", f"M{last + 14} 128 C{last + 8} 162 500 160 482 194")
    canvas.box("missing", 176, 200, 178, 80, "refused\ntruncated, corrupt,\nreplaced: typed error", bold=True)
    canvas.path("talk", "M496 128 C480 160 380 150 312 194")
    canvas.path("talk", "M356 128 C350 150 300 160 272 194")
    canvas.path("talk", "M464 280 V296 Q464 314 446 314 H94 Q76 314 76 296 V134")
    canvas.text(96, 306, "needed again: fetched again", "note")
    return canvas


def deaths() -> Canvas:
    """Draw what becomes of a reader's leases, and of the daemon's readers, when one of them dies."""
    canvas = Canvas(
        "When a process dies",
        "When a reader dies, its leases and its plan end within a second, and the downloads go on for other readers. "
        "When the daemon dies, readers finish the shards that they have open and wait for the next daemon, which finds "
        "the published shards and the finished parts of downloads on the disk.",
        296,
    )
    left = LANE_LEFT_PX
    canvas.text(20, 34, "a reader dies", "name")
    _lane(canvas, 46, "reader 0", [("ours", 0, 230, "reads")])
    _lane(canvas, 46 + LANE_PX, "reader 1", [("ours", 0, 578, "reads on")])
    _lane(canvas, 46 + 2 * LANE_PX, "daemon", [("coming", 0, 578, "downloads go on for reader 1")])
    canvas.path("talk", f"M{left + 236} 59 H{left + 262}")
    canvas.text(left + 270, 63, "its leases and its plan end within a second", "note")

    canvas.text(20, 174, "the daemon dies", "name")
    reading = [("ours", 0, 290, "finish open shards"), ("free", 296, 108, "wait"), ("ours", 410, 168, "read on")]
    _lane(canvas, 186, "readers", reading)
    serving = [("coming", 0, 180, "fetches"), ("here", 380, 198, "serves what is on disk")]
    _lane(canvas, 186 + LANE_PX, "daemon", serving)
    disk = [("here", 0, 578, "published shards, and finished parts of downloads, stay")]
    _lane(canvas, 186 + 2 * LANE_PX, "disk", disk)
    canvas.path("talk", f"M{left + 380} 214 V188")
    canvas.text(left + 190, 236, "killed", "note")
    canvas.text(left + 372, 236, "started again", "note end")
    return canvas


def _lane(canvas: Canvas, y: float, name: str, spans: list[tuple[str, float, float, str]]) -> None:
    """Draw what one of them does: each span has a kind, a begin, a length and a label."""
    canvas.text(LANE_LEFT_PX - 14, y + 18, name, "note end")
    for kind, begin, length, label in spans:
        canvas.box(kind, LANE_LEFT_PX + begin, y, length, 26, label)
