"""Splits of the names of a tar's members into key and extension, as the shard's url says them.

WebDataset's rule is the first dot of a name. Other programs take the last one, as WeNet does: the
member `spk.01.wav` is the `wav` of sample `spk.01` then. It decides which samples a shard has, so
it is a part of the shard's url, `a.tar#key_split=last-dot`, and with it of its name in the cache,
of its counts, and of the indexes that list it.
"""

from typing import Literal, TypeAlias

KeySplit: TypeAlias = Literal["first-dot", "last-dot"]

FIRST_DOT: KeySplit = "first-dot"
LAST_DOT: KeySplit = "last-dot"

_MARK = f"#key_split={LAST_DOT}"


def with_key_split(url: str, key_split: str) -> str:
    """Return a url or pattern that says where names are split; unchanged for the first dot."""
    if key_split == FIRST_DOT or url.endswith(_MARK):
        return url
    return url + _MARK


def key_split_in(url: str) -> tuple[str, str]:
    """Return a url without what it says of names, and where they are split."""
    if url.endswith(_MARK):
        return url[: -len(_MARK)], LAST_DOT
    return url, FIRST_DOT
