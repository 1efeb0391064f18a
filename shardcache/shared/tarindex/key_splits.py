"""Key splits: the dot at which the names of a tar's members are split into key and extension.

WebDataset splits a name at its first dot. Other programs, such as WeNet, split it at the last dot:
the member `spk.01.wav` is then the `wav` of the sample `spk.01`. The key split decides which
samples a shard has. So it is part of the shard's url, as in `a.tar#key_split=last-dot`, and of
everything that is kept by url: the shard's cache key, its counts, and the indexes that list it.
"""

from typing import Literal, TypeAlias

KeySplit: TypeAlias = Literal["first-dot", "last-dot"]

FIRST_DOT: KeySplit = "first-dot"
LAST_DOT: KeySplit = "last-dot"

_MARK = f"#key_split={LAST_DOT}"


def with_key_split(url: str, key_split: str) -> str:
    """Return a url or pattern with a key split; it stays unchanged for the first dot."""
    if key_split == FIRST_DOT or url.endswith(_MARK):
        return url
    return url + _MARK


def key_split_in(url: str) -> tuple[str, str]:
    """Return a url without its key split, and the key split, which is the first dot by default."""
    if url.endswith(_MARK):
        return url[: -len(_MARK)], LAST_DOT
    return url, FIRST_DOT
