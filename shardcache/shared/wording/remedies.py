"""Remedies of errors: where no process starts, and where the user may have meant another name."""

from collections.abc import Iterable

NO_PROCESS_REMEDY = (
    "check the limits on memory and processes (ulimit -a, the container's); "
    "if Python was replaced while the daemon was running, restart it"
)
"""Remedy of a `CacheError` if the daemon cannot start one of its processes."""

_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff", "gif"})
_MIN_SIMILARITY = 0.6  # of two names, from 0 to 1


def member_remedy(
    extension: str,
    present: list[str],
    unread: list[str],
    *,
    is_named: bool,
) -> str:
    """Return the remedy for a sample that lacks a member.

    Args:
        extension: extension of the missing member.
        present: extensions of the members that the sample has.
        unread: extensions of the members in its shard that were not read.
        is_named: True if the dataset names the member; False if it reads all members, and other
            samples have this one.
    """
    option = (
        "missing='skip' to leave such samples out, or "
        f"missing={{{extension!r}: default}} to fill it in"
    )
    if is_named:
        remedy = f"pass {option}"
    else:
        remedy = f"name the members, members={(*present, extension)!r}, with {option}; "
        remedy += f"or read members={tuple(present)!r} alone"
    advice = _advice_to_name_another(extension, [*present, *unread])
    if not advice:
        return remedy
    return f"{advice}; else {remedy}"


def _advice_to_name_another(extension: str, members: list[str]) -> str:
    """Return the advice to name another, similar member; "" if no member is similar."""
    # 1. The extension is the end of a longer one, as "png" is of "left.png".
    dotted = [name for name in members if name.endswith(f".{extension}")]
    if dotted:
        return f'name "*.{extension}", which fits {dotted[0]!r}'

    # 2. The sample has its image in another format.
    images = [name for name in members if name in _IMAGES]
    if extension in _IMAGES and images:
        return f'name {images[0]!r}; "{extension};{images[0]}" takes either'

    # 3. The extension is misspelt.
    closest = _closest(extension, members, _MIN_SIMILARITY)
    is_misspelt_image = _closest(extension, _IMAGES, _MIN_SIMILARITY) is not None
    if closest is None and is_misspelt_image:
        closest = _closest(extension, images, 0)  # any image of the sample
    if closest is None:
        return ""
    return f"did you mean {closest!r}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = _MIN_SIMILARITY) -> str:
    """Return `; did you mean 'capacity'?` for the closest known name; "" if none is close.

    Args:
        cutoff: minimum similarity, 0 to 1, of names that count as close.
    """
    closest = _closest(name, known, cutoff)
    if closest is None:
        return ""
    return f"; did you mean {closest!r}?"


def _closest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return the known name that is most similar, if it is at least as similar as the cutoff."""
    # The import is here because only errors need it, and every command and trainer imports this
    # module.
    import difflib

    closest = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=cutoff)
    if not closest:
        return None
    return closest[0]
