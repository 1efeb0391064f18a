"""The figure of the README, of numbers that docs/benchmarks.md has."""

from canvas import Canvas
from plots import PAGE, bars_of

LEFT = 200
FULL_PX = 360


def measured() -> Canvas:
    """Draw what three jobs fetch with and without a shared cache, and how fast samples are read from it."""
    page = PAGE.read_text()
    fetched = dict(bars_of(page, "MB, from the store, 3 LitData jobs"))
    read = dict(bars_of(page, "samples/s, 100 KB"))
    speeds = [
        ("shardcache", round(read["shardcache"]), "here"),
        ("LitData", round(read["litdata"]), "box"),
        ("webdataset", round(read["webdataset"]), "box"),
    ]
    alone = round(fetched["without the endpoint"])
    shared = round(fetched["shardcache"])
    said = ", ".join(f"{value:,} with {name}" for name, value, _ in speeds)
    canvas = Canvas(
        "Measured: bytes fetched by three jobs, and samples read per second",
        f"Three jobs that train on the same {shared:,} MB fetch {alone:,} MB by themselves and {shared:,} MB through "
        f"shardcache. Samples of 100 KB that one process reads per second: {said}.",
        278,
    )
    canvas.text(20, 36, f"Fetched from the object store by 3 jobs that train on the same {shared:,} MB", "name")
    _bars(canvas, 50, [("each by itself", alone, "missing"), ("through shardcache", shared, "here")], "MB")
    canvas.text(20, 146, "Samples of 100 KB read per second, by one process, from local disk", "name")
    _bars(canvas, 160, speeds, "samples/s")
    return canvas


def _bars(canvas: Canvas, top: float, rows: list[tuple[str, int, str]], unit: str) -> None:
    largest = max(value for _, value, _ in rows)
    for number, (name, value, kind) in enumerate(rows):
        y = top + 34 * number
        length = FULL_PX * value / largest
        canvas.text(LEFT - 12, y + 18, name, "end")
        canvas.box(kind, LEFT, y, length, 26)
        canvas.text(LEFT + length + 8, y + 18, f"{value:,} {unit}", "note")
