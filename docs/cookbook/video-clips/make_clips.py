"""Write shards of clips, which are sorted by what they show, as clips cut from long videos are."""

import io
import random

from PIL import Image, ImageDraw

from shardcache.writing import ShardWriter

SIDE = 32
FRAMES = 12
CLIPS = 40
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def clip(move: tuple[int, int], dice: random.Random) -> bytes:
    """Return an animation of a ball that moves."""
    left, top = dice.randrange(13, 19), dice.randrange(13, 19)
    frames = []
    for number in range(FRAMES):
        frame = Image.new("RGB", (SIDE, SIDE), (20, 20, 20))
        x, y = left + move[0] * number, top + move[1] * number
        ImageDraw.Draw(frame).ellipse((x - 4, y - 4, x + 4, y + 4), fill=(240, 240, 240))
        frames.append(frame)
    data = io.BytesIO()
    frames[0].save(data, "webp", save_all=True, append_images=frames[1:], duration=40, lossless=True)
    return data.getvalue()


def main() -> None:
    """Write all; the same in each run."""
    dice = random.Random(7)
    with ShardWriter("shards/", shard_size_bytes=64 * 1024) as shards:
        for label, (name, move) in enumerate(MOVES.items()):
            for number in range(CLIPS):
                shards.write({"__key__": f"{name}-{number:04d}", "webp": clip(move, dice), "cls": label})


if __name__ == "__main__":
    main()
