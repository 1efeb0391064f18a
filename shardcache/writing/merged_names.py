"""Names of files that became one sample, though they suggest samples of their own.

Numbers or rare words in them do.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations


def numbers_apart(extensions: Sequence[str]) -> tuple[str, str] | None:
    """Return two extensions that begin with different numbers, if there are any.

    Or of which one is the other's with a number before it. Words there, as in `left.png` and
    `right.png`, name members of one sample.
    """
    if not any(extension[:1].isdigit() for extension in extensions):
        return None
    for one, other in combinations(extensions, 2):
        name, _, suffix = one.rpartition(".")
        other_name, _, other_suffix = other.rpartition(".")
        if name == other_name:
            continue
        numbered = [each for each in (name, other_name) if each[:1].isdigit()]
        if len(numbered) == 2 or (numbered and suffix == other_suffix):
            return one, other
    return None


class RareWords:
    """Finds files such as J.Brown.jpg and J.Smith.jpg, which readers take for one sample.

    Files of one key and one last extension are members of one sample if the words in between are
    those of other keys, too (0001.left.jpg and 0001.right.jpg), or are added to another file's name
    (0001.seg.png beside 0001.png). Memory: the distinct extensions of several parts.
    """

    def __init__(self) -> None:
        # By extension of several parts, the number of keys that have it.
        self._keys_with = Counter[str]()
        # By extension, a file that has it, and one it was merged with.
        self._doubtful: dict[str, tuple[str, str]] = {}

    def add(self, files: Mapping[str, str]) -> None:
        """Note the files of a key, by extension."""
        compound = [extension for extension in files if "." in extension]
        self._keys_with.update(compound)
        shortened = {shorter for extension in compound for shorter in _endings(extension)}
        for one, other in _same_last_part(files):
            for extension in (one, other):
                is_longer = not files.keys().isdisjoint(_endings(extension))
                if extension not in shortened and not is_longer:
                    self._doubtful.setdefault(extension, (files[one], files[other]))

    def found(self) -> tuple[str, str] | None:
        """Return two files told apart by words that no other key has, if there are any."""
        for extension, files in self._doubtful.items():
            if self._keys_with[extension] == 1:
                return files
        return None


def _same_last_part(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each extension whose last part an earlier one has, too, after the first such."""
    first_with: dict[str, str] = {}
    for extension in files:
        _, _, last_part = extension.rpartition(".")
        first = first_with.setdefault(last_part, extension)
        if first != extension:
            yield first, extension


def _endings(extension: str) -> list[str]:
    """Return the shorter extensions that an extension ends in.

    `nii.gz` and `gz` of `seg.nii.gz`.
    """
    parts = extension.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]
