"""Drawings of what the daemon does: parts and ranges, private and shared daemons, the tier."""

from canvas import Canvas

PARTS = 12


def parts() -> Canvas:
    """Draw an object in parts: a shard fetched whole, and a table of which two ranges are read."""
    canvas = Canvas(
        "Parts and ranges",
        "A shard is fetched whole, in parts of 8 MiB that arrive over several connections in any order, and is "
        "published once all have been checked. Of a file that is read by ranges, only the parts under the ranges "
        "are fetched, each of 256 KiB.",
        330,
    )
    width = 44
    left = 150
    canvas.text(20, 62, "a shard", "name")
    canvas.text(20, 79, "parts of 8 MiB", "note")
    arrived = {0, 1, 2, 3, 5, 8}
    on_their_way = {4, 6, 7, 9}
    for part in range(PARTS):
        kind = "free"
        if part in arrived:
            kind = "here"
        if part in on_their_way:
            kind = "coming"
        canvas.box(kind, left + part * width, 44, width - 4, 36, str(part))
    canvas.text(left, 104, "checked and on disk (green), on a connection (amber), next (dashed)", "note")
    canvas.path("talk", f"M{left + 2 * width} 116 V146")
    canvas.box("ours", left, 150, 4 * width - 4, 36, "read while it arrives")
    canvas.box("here", left + 5 * width, 150, 7 * width - 4, 36, "all checked and indexed: published")

    canvas.text(20, 242, "a table", "name")
    canvas.text(20, 259, "parts of 256 KiB", "note")
    wanted = {2, 3, 10, 11}
    for part in range(PARTS):
        kind = "here" if part in wanted else "free"
        canvas.box(kind, left + part * width, 224, width - 4, 36, str(part))
    canvas.path("line", f"M{left + 2 * width + 12} 274 H{left + 4 * width - 14}")
    canvas.path("line", f"M{left + 10 * width + 6} 274 H{left + 12 * width - 6}")
    canvas.text(left + 3 * width, 296, "two columns", "note mid")
    canvas.text(left + 11 * width, 296, "the footer", "note mid")
    canvas.text(left + 4 * width + 20, 296, "nothing else is fetched", "note")
    canvas.text(
        20, 318, "Each part is fetched once per node, whoever asks, and is checked against one version.", "note"
    )
    return canvas


def daemons() -> Canvas:
    """Draw a node with a private daemon per user, and one with a daemon for all."""
    canvas = Canvas(
        "Private and shared daemons",
        "Without a setup, each user's first reader starts a private daemon with the user's own credentials and cache. "
        "With a daemon for the node, all users share one cache, and jobs need no credentials.",
        330,
    )
    for x, title in ((20, "nobody set anything up"), (370, "a daemon for the node")):
        canvas.box("group", x, 20, 330, 250)
        canvas.text(x + 14, 42, title, "name")
    for number, user in enumerate(("Ada", "Ben")):
        x = 34 + number * 156
        canvas.box("box", x, 60, 146, 44, f"{user}'s jobs\nand credentials")
        canvas.path("talk", f"M{x + 73} 104 V132")
        canvas.box("ours", x, 136, 146, 44, f"private daemon\nof {user}")
        canvas.path("bytes", f"M{x + 73} 180 V208")
        canvas.box("here", x, 214, 146, 40, f"{user}'s cache")
    for number, user in enumerate(("Ada", "Ben")):
        x = 384 + number * 156
        canvas.box("box", x, 60, 146, 44, f"{user}'s jobs\nno credentials")
        canvas.path("talk", f"M{x + 73} 104 V132")
    canvas.box("ours", 384, 136, 302, 44, "shardcache serve\ncredentials, rules who may read what")
    canvas.path("bytes", "M535 180 V208")
    canvas.box("here", 384, 214, 302, 40, "one cache for all")
    canvas.text(20, 294, "Starts by itself, ends ten minutes", "note")
    canvas.text(20, 312, "after the last reader.", "note")
    canvas.text(370, 294, "Started by an administrator: systemd,", "note")
    canvas.text(370, 312, "Kubernetes or Slurm.", "note")
    return canvas


def tier() -> Canvas:
    """Draw three nodes, the owners of a shard's parts, and the one fetch of each."""
    canvas = Canvas(
        "One fetch for a cluster",
        "Each part of a shard has one owner among the nodes. A daemon asks its own node's nginx for a part; that "
        "forwards the request to the owner, which fetches the part from the object store once and keeps it.",
        350,
    )
    canvas.box("box", 240, 20, 240, 40, "object store")
    for node in range(3):
        x = 20 + node * 234
        canvas.box("group", x, 110, 212, 200)
        canvas.text(x + 106, 304, f"node {node}", "name mid")
        canvas.box("ours", x + 16, 250, 180, 40, "daemon and its cache")
        canvas.box("here", x + 16, 160, 180, 44, f"nginx\nowns parts {node}, {node + 3}, {node + 6}")
        canvas.path("talk", f"M{x + 106} 250 V210")
        canvas.path("bytes", f"M360 60 L{x + 106} 154")
    canvas.path("talk", "M216 190 H264")
    canvas.path("talk", "M450 190 H498")
    canvas.text(20, 334, "A part crosses the link to the store once; between nodes it travels from its owner.", "note")
    return canvas
