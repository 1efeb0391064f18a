"""Numbers the parts of the dashboard's picture: `python docs/drawings/callouts.py`.

Run it after `python -m pictures` in tests/ has taken the picture. The places are those of the picture's
own size, 1280 px wide.
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

PICTURES = Path(__file__).parents[1] / "pictures"
RADIUS_PX = 15
FONT_PX = 20
CENTRES = [
    (1_232, 136),  # the first line
    (635, 350),  # Ahead
    (728, 350),  # Waited
    (976, 350),  # the strip of the next five minutes
    (284, 667),  # Needed soon
    (920, 667),  # Download rate
    (972, 1_223),  # Limits
]


def number(source: Path, target: Path) -> None:
    """Copy a picture with a numbered disc at each of the places."""
    with Image.open(source) as opened:
        picture = opened.convert("RGB")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(FONT_PX)
    for label, (x, y) in enumerate(CENTRES, start=1):
        disc = (x - RADIUS_PX, y - RADIUS_PX, x + RADIUS_PX, y + RADIUS_PX)
        draw.ellipse(disc, fill="#7a1fa2", outline="white", width=2)
        draw.text((x, y), str(label), fill="white", font=font, anchor="mm")
    # Of many colours, those of small areas are kept only by FASTOCTREE, such as a legend's.
    picture.quantize(256, Image.Quantize.FASTOCTREE).save(target, optimize=True)


def main() -> None:
    """Number the pictures of the waiting dashboard."""
    for suffix in ("", "-dark"):
        number(PICTURES / f"dashboard-waiting{suffix}.png", PICTURES / f"dashboard-numbered{suffix}.png")


if __name__ == "__main__":
    main()
