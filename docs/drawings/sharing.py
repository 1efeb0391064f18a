"""Drawings of what a cache saves, and of a loader's workers as processes and as threads."""

from canvas import Canvas

ROW = 32
BAR = 26
LEFT = 130


def saved() -> Canvas:
    """Draw what three jobs read, and what was fetched for them."""
    canvas = Canvas(
        "Fetched, read and saved",
        "The daemon fetches 100 GB from the object store once. Three jobs read these 100 GB each, 300 GB in all. "
        "Without a cache they would fetch what they read, so 200 GB are saved.",
        226,
    )
    canvas.box("box", 20, 78, 130, 44, "object store")
    canvas.path("bytes", "M150 100 H276")
    canvas.text(213, 88, "100 GB", "note mid")
    canvas.text(213, 126, "fetched", "name mid")
    canvas.box("here", 284, 78, 150, 44, "cache on the\nnode's disk")
    for job in range(3):
        middle = 42 + job * 58
        canvas.path("bytes", f"M434 100 L564 {middle}")
        canvas.box("ours", 572, middle - 19, 128, 38, f"job {job}: 100 GB")
    canvas.text(500, 190, "read", "name mid")
    canvas.text(20, 210, "saved = read, 3 × 100 GB, less fetched, 100 GB: 200 GB", "note")
    return canvas


def workers() -> Canvas:
    """Draw two workers and the training loop, as processes and as threads."""
    canvas = Canvas(
        "Workers as processes and as threads",
        "Processes make batches side by side, and each batch is copied into the training process. Threads need no "
        "copy, but they and the training loop take turns while they run Python, under the global lock.",
        330,
    )
    canvas.text(20, 34, "processes", "name")
    makes = (150, "here")
    copies = (46, "coming")
    steps = (48, "ours")
    _row(canvas, 46, "worker 0", [(0, *makes), (150, *copies), (196, *makes), (346, *copies)])
    _row(canvas, 46 + ROW, "worker 1", [(50, *makes), (200, *copies), (246, *makes), (396, *copies)])
    _row(canvas, 46 + 2 * ROW, "training", [(196, *steps), (246, *steps), (392, *steps), (442, *steps)])

    canvas.text(20, 168, "threads", "name")
    makes = (130, "here")
    locks = (20, "missing")
    steps = (40, "ours")
    _row(canvas, 180, "worker 0", [(0, *makes), (130, *locks), (150, *makes), (280, *locks)])
    _row(canvas, 180 + ROW, "worker 1", [(40, *makes), (170, *locks), (190, *makes), (320, *locks)])
    begun = [(150, *steps), (190, *locks), (210, *steps), (250, *locks)]
    _row(canvas, 180 + 2 * ROW, "training", [*begun, (300, *locks), (320, *steps), (360, *locks), (380, *steps)])

    for x, kind, label in (
        (20, "here", "decodes"),
        (116, "coming", "copies to the training process"),
        (360, "missing", "runs Python: one at a time"),
        (576, "ours", "training step"),
    ):
        canvas.box(kind, x, 296, 16, 16)
        canvas.text(x + 24, 308, label, "note")
    return canvas


def _row(canvas: Canvas, y: float, name: str, spans: list[tuple[float, float, str]]) -> None:
    """Draw what a worker or the training loop does: each span has a begin, a length and a kind."""
    canvas.text(LEFT - 14, y + 18, name, "note end")
    for begin, length, kind in spans:
        canvas.box(kind, LEFT + begin, y, length, BAR)
