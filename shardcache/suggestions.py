"""Words that may have been meant, for the remedies of errors."""

from collections.abc import Iterable

_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff", "gif"})


def member_remedy(
    extension: str,
    has: list[str],
    unread: list[str],
    *,
    is_named: bool,
) -> str:
    """Return what to do about a sample without a member.

    Args:
        extension: of the member.
        has: the members that the sample has.
        unread: those in its shard that were not read.
        is_named: True if the dataset names the member.
    """
    fill = (
        "missing='skip' to leave such samples out, or "
        f"missing={{{extension!r}: default}} to fill it in"
    )
    if is_named:
        remedy = f"pass {fill}"
    else:
        remedy = f"name the members, members={(*has, extension)!r}, with {fill}; "
        remedy += f"or read members={tuple(has)!r} alone"
    meant = _kin_of(extension, [*has, *unread])
    if not meant:
        return remedy
    return f"{meant}; else {remedy}"


def _kin_of(extension: str, members: list[str]) -> str:
    """Return the advice to name another member, which may have been meant; "" if none is alike."""
    dotted = [name for name in members if name.endswith(f".{extension}")]
    if dotted:
        return f'name "*.{extension}", which fits {dotted[0]!r}'
    images = [name for name in members if name in _IMAGES]
    if extension in _IMAGES and images:
        return f'name {images[0]!r}; "{extension};{images[0]}" takes either'
    meant = did_you_mean(extension, members)
    is_misspelt_image = bool(did_you_mean(extension, _IMAGES))
    if not meant and is_misspelt_image:
        meant = did_you_mean(extension, images, 0)
    return meant.strip("; ?")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'capacity'?` for the closest known name; "" if none is close.

    Args:
        cutoff: the least similarity, 0 to 1, of names that count as close.
    """
    import difflib  # for an error alone; every command and trainer imports this module

    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=cutoff)
    if not near:
        return ""
    return f"; did you mean {near[0]!r}?"
