"""Draw photos of two kinds of shapes into photos/KIND/NUMBER.jpg."""

import random
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 64
PHOTOS = 96


def draw(kind: str, dice: random.Random) -> Image.Image:
    """Return a photo of one shape, somewhere, in some color, on some ground."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(dice.randrange(128) for _ in range(3)))
    left, top = (dice.randrange(4, 20) for _ in range(2))
    size = dice.randrange(20, 40)
    color = tuple(dice.randrange(128, 256) for _ in range(3))
    pen = ImageDraw.Draw(image)
    shape = pen.ellipse if kind == "circle" else pen.rectangle
    shape((left, top, left + size, top + size), fill=color)
    return image


def main() -> None:
    """Draw all photos; the same ones in each run."""
    dice = random.Random(7)
    for kind in ("circle", "square"):
        folder = Path("photos", kind)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(PHOTOS):
            draw(kind, dice).save(folder / f"{number:04d}.jpg")


if __name__ == "__main__":
    main()
