"""A canvas for the drawings of the documentation: an SVG that follows the reader's light or dark colours.

Every label is measured when it is placed: one that does not fit its box, or leaves the canvas, is an error.
"""

from html import escape
from pathlib import Path

# Widths of letters differ between the fonts of readers' machines: this is a wide one's, per letter and pixel of size.
LETTER_WIDTH = 0.56
BOLD_LETTER_WIDTH = 0.62
TEXT_PX = 14.0
NOTE_PX = 12.5
RADIUS = 4

STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #16212b }
    .note { font-size: 12.5px; fill: #4a5a68 }
    .name { font-weight: 600 }
    .mid { text-anchor: middle }
    .end { text-anchor: end }
    .paper { fill: #fbfcfe; stroke: #d3dce4 }
    .group { fill: #f0f4f8; stroke: #b9c6d2; stroke-dasharray: 5 4 }
    .box { fill: #ffffff; stroke: #60717f; stroke-width: 1.5 }
    .ours { fill: #dcebff; stroke: #1a5fb4; stroke-width: 1.5 }
    .here { fill: #bfe6cb; stroke: #26734d; stroke-width: 1.5 }
    .coming { fill: #ffe7a0; stroke: #8f6200; stroke-width: 1.5 }
    .missing { fill: #ffd3ce; stroke: #b3261e; stroke-width: 1.5 }
    .other { fill: #eadcff; stroke: #6a3fb5; stroke-width: 1.5 }
    .free { fill: none; stroke: #8796a3; stroke-dasharray: 3 3 }
    .dot { fill: #1a5fb4 }
    .bytes { fill: none; stroke: #1a5fb4; stroke-width: 3; marker-end: url(#bytes) }
    .talk { fill: none; stroke: #60717f; stroke-width: 1.5; marker-end: url(#talk) }
    .line { fill: none; stroke: #60717f; stroke-width: 1.5 }
    .tip-bytes { fill: #1a5fb4 }
    .tip-talk { fill: #60717f }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .note { fill: #a9b6c2 }
      .paper { fill: #14191f; stroke: #313c46 }
      .group { fill: #1b232b; stroke: #4a5966 }
      .box { fill: #222c35; stroke: #93a4b2 }
      .ours { fill: #15355f; stroke: #78aef5 }
      .here { fill: #1d4a33; stroke: #6cc794 }
      .coming { fill: #574205; stroke: #e5b93f }
      .missing { fill: #5f201b; stroke: #f2948c }
      .other { fill: #3a2763; stroke: #b79af0 }
      .free { stroke: #6f7f8c }
      .dot { fill: #78aef5 }
      .bytes { stroke: #78aef5 }
      .talk, .line { stroke: #93a4b2 }
      .tip-bytes { fill: #78aef5 }
      .tip-talk { fill: #93a4b2 }
    }
"""

MARKERS = """
    <marker id="bytes" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="3.6" markerHeight="3.6" orient="auto">
      <path class="tip-bytes" d="M0 0 8 4 0 8z"/></marker>
    <marker id="talk" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
      <path class="tip-talk" d="M0 0 8 4 0 8z"/></marker>
"""


class LabelTooWideError(Exception):
    """A label is wider than its box, or leaves the canvas."""


class Canvas:
    """One drawing, 720 px wide, so that it is shown in its own size beside a page's navigation."""

    width = 720

    def __init__(self, title: str, description: str, height: int) -> None:
        self.title = title
        self.description = description
        self.height = height
        self._parts: list[str] = []
        self._add(f'<rect class="paper" x="0.5" y="0.5" width="{self.width - 1}" height="{height - 1}" rx="8"/>')

    def text(self, x: float, y: float, label: str, kind: str = "") -> None:
        """Write a label whose baseline is at `y`; `kind` has any of note, name, mid and end."""
        kinds = kind.split()
        size_px = NOTE_PX if "note" in kinds else TEXT_PX
        letter_width = BOLD_LETTER_WIDTH if "name" in kinds else LETTER_WIDTH
        width_px = len(label) * size_px * letter_width
        left = x
        if "mid" in kinds:
            left = x - width_px / 2
        if "end" in kinds:
            left = x - width_px
        if left < 0 or left + width_px > self.width or not 0 < y < self.height:
            bounds = f"from {left:.0f} to {left + width_px:.0f}"
            raise LabelTooWideError(f"{self.title}: {label!r} leaves the canvas, {bounds}")
        self._add(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(label)}</text>')

    def box(
        self, kind: str, x: float, y: float, width: float, height: float, label: str = "", bold: bool = False
    ) -> None:
        """Draw a rectangle with lines of text in its middle; `\\n` begins another line."""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._add(f'<rect class="{kind}" {at} rx="{RADIUS}"/>')
        lines = label.split("\n") if label else []
        top = y + height / 2 - 8 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            if len(line) * NOTE_PX * LETTER_WIDTH > width - 4:
                raise LabelTooWideError(f"{self.title}: {line!r} is wider than its box of {width:g}")
            is_title = bold and number == 0
            self.text(x + width / 2, top + 16 * number, line, "name mid" if is_title else "note mid")

    def path(self, kind: str, path: str) -> None:
        """Draw a line, or an arrow of the kinds `bytes` and `talk`."""
        self._add(f'<path class="{kind}" d="{path}"/>')

    def dots(self, places: list[tuple[float, float]], size: float) -> None:
        """Draw squares around `places`."""
        half = size / 2
        path = "".join(f"M{x - half:.1f} {y - half:.1f}h{size:g}v{size:g}h{-size:g}z" for x, y in places)
        self.path("dot", path)

    def save(self, path: Path) -> None:
        """Write the drawing to a file."""
        path.write_text(self.svg())

    def svg(self) -> str:
        """Return the drawing as a file."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">'
        return "\n".join(
            [
                head,
                f'  <title id="title">{escape(self.title)}</title>',
                f'  <desc id="desc">{escape(self.description)}</desc>',
                f"  <style>{STYLE}  </style>",
                f"  <defs>{MARKERS}  </defs>",
                *self._parts,
                "</svg>\n",
            ]
        )

    def _add(self, element: str) -> None:
        self._parts.append(f"  {element}")
