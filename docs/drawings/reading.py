"""Drawings of what a training loop reads: an epoch on several ranks, a look, a window."""

import random
from collections.abc import Iterator

from canvas import Canvas

LEFT = 130
BAND = 34
RANKS_BEFORE = 4
RANKS_AFTER = 3

# Of the picture of windows: few enough to see single samples.
SHARDS = 24
SAMPLES_PER_SHARD = 16
SAMPLES = SHARDS * SAMPLES_PER_SHARD
WINDOW = 8


def epoch() -> Canvas:
    """Draw an epoch on four ranks, a stop, and the rest on three."""
    canvas = Canvas(
        "An epoch on 4 ranks, resumed on 3",
        "An epoch is one sequence of samples, cut into four equal spans, one per rank. At the checkpoint each rank has "
        "read the same number of batches. What is left of the four spans is put end to end and cut into three.",
        360,
    )
    whole = Canvas.width - LEFT - 24
    canvas.text(20, 46, "epoch 0", "name")
    canvas.box("ours", LEFT, 26, whole, BAND, "one sequence: every sample once, in an order that seed and epoch decide")

    canvas.text(20, 112, "4 ranks", "name")
    canvas.text(20, 129, "equal spans", "note")
    span = whole / RANKS_BEFORE
    taken = span * 0.6
    for rank in range(RANKS_BEFORE):
        x = LEFT + rank * span
        canvas.box("box", x, 92, span, BAND, f"rank {rank}")
        canvas.box("here", x, 158, taken, BAND, "read")
        canvas.box("coming", x + taken, 158, span - taken, BAND, "left")
    canvas.text(20, 178, "stopped", "name")
    canvas.text(20, 195, "at a checkpoint", "note")

    rest = (span - taken) * RANKS_BEFORE
    start = LEFT + (whole - rest) / 2
    each = rest / RANKS_AFTER
    for rank in range(RANKS_BEFORE):
        middle = LEFT + rank * span + taken + (span - taken) / 2
        target = start + (rank + 0.5) * (span - taken)
        canvas.path("talk", f"M{middle:.1f} 195 C{middle:.1f} 230 {target:.1f} 225 {target:.1f} 251")
    canvas.text(20, 272, "3 ranks", "name")
    canvas.text(20, 289, "equal again", "note")
    for rank in range(RANKS_AFTER):
        canvas.box("box", start + rank * each, 256, each, BAND, f"rank {rank}")
    canvas.text(LEFT, 322, "What is left is put end to end and cut again, down to single samples, so every", "note")
    canvas.text(LEFT, 340, "remaining sample is read once. The workers of a rank share its span.", "note")
    return canvas


def look() -> Canvas:
    """Draw three ways to begin an iterator, and what the next loop reads after each."""
    canvas = Canvas(
        "A look takes nothing from the loop",
        "If only one batch was taken from an iterator, the next loop begins the same epoch at its first batch. If two "
        "or more were taken, the epoch counts as read, and the next loop reads the epoch after it.",
        300,
    )
    rows = [
        ("a look", "next(iter(loader))", 1, "for batch in loader", 0),
        ("a loop left early", "… break after 3", 3, "for batch in loader", 1),
    ]
    width = 40
    for number, (name, code, taken, then, epoch_after) in enumerate(rows):
        y = 50 + 116 * number
        canvas.text(20, y + 16, name, "name")
        canvas.text(20, y + 34, code, "note")
        for batch in range(taken):
            canvas.box("here", 180 + batch * (width + 4), y, width, BAND, str(batch))
        canvas.text(180, y + 54, "batches of epoch 0", "note")
        canvas.path("talk", f"M{180 + taken * (width + 4) + 4} {y + 17} H376")
        kind = "here" if epoch_after == 0 else "coming"
        for batch in range(5):
            canvas.box(kind, 384 + batch * (width + 4), y, width, BAND, str(batch))
        canvas.text(612, y + 22, f"of epoch {epoch_after}", "note")
        canvas.text(384, y + 54, then, "note")
    canvas.text(20, 266, "One batch is a look: the epoch and the saved position stay as they were.", "note")
    canvas.text(20, 284, "From the second batch on, an iterator counts as having read its epoch.", "note")
    return canvas


def window() -> Canvas:
    """Draw where in the dataset the samples come from that are read one after the other."""
    canvas = Canvas(
        "What a window shuffles",
        "Three panels plot the place of each sample in the shards over the place at which it is read. With window 1 "
        f"the samples of one shard come together; with window {WINDOW} those of {WINDOW} shards are mixed at any time; "
        "a global shuffle has samples of all shards everywhere.",
        330,
    )
    orders = [
        ("shuffle_window=1", "one shard at a time", windowed(1)),
        (f"shuffle_window={WINDOW}", f"{WINDOW} shards at a time", windowed(WINDOW)),
        ('shuffle="global"', "all samples", everything()),
    ]
    side = 200
    for number, (name, note, order) in enumerate(orders):
        x = 40 + number * (side + 24)
        canvas.text(x + side / 2, 34, name, "name mid")
        canvas.text(x + side / 2, 52, note, "note mid")
        canvas.box("box", x, 62, side, side)
        scale = (side - 10) / SAMPLES
        places = [(x + 5 + at * scale, 62 + side - 5 - sample * scale) for at, sample in enumerate(order)]
        canvas.dots(places, 2)
        canvas.text(x + side / 2, 280, "read first … last", "note mid")
    canvas.path("talk", "M28 258 V70")
    canvas.text(20, 312, "Upwards: where the sample lies in the dataset, 24 shards of 16 samples.", "note")
    return canvas


def windowed(size: int) -> list[int]:
    """Return the numbers of the samples in the order of a window: each shard gives its own over `size` steps."""
    rng = random.Random(3)
    shards = list(range(SHARDS))
    rng.shuffle(shards)
    steps: list[list[int]] = [[] for _ in range(SHARDS + size - 1)]
    for step, shard in enumerate(shards):
        samples = list(range(shard * SAMPLES_PER_SHARD, (shard + 1) * SAMPLES_PER_SHARD))
        rng.shuffle(samples)
        for number, sample in enumerate(samples):
            steps[step + number * size // SAMPLES_PER_SHARD].append(sample)
    return list(_mixed(steps, rng))


def _mixed(steps: list[list[int]], rng: random.Random) -> Iterator[int]:
    for step in steps:
        rng.shuffle(step)
        yield from step


def everything() -> list[int]:
    """Return a permutation of all samples."""
    samples = list(range(SAMPLES))
    random.Random(3).shuffle(samples)
    return samples
