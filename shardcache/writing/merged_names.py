"""Names of files that became one sample, although numbers or rare words suggest several."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations


def numbers_apart(extensions: Sequence[str]) -> tuple[str, str] | None:
    """Return two extensions of a sample that differ by a number at the beginning, if there are any.

    Both begin with a number, or one does and both have the same suffix. Words there, as in
    `left.png` and `right.png`, name members of one sample.
    """
    if not any(extension[:1].isdigit() for extension in extensions):
        return None
    for first, second in combinations(extensions, 2):
        first_name, _, first_suffix = first.rpartition(".")
        second_name, _, second_suffix = second.rpartition(".")
        if first_name == second_name:
            continue
        is_first_numbered = first_name[:1].isdigit()
        is_second_numbered = second_name[:1].isdigit()
        if is_first_numbered and is_second_numbered:
            return first, second
        if (is_first_numbered or is_second_numbered) and first_suffix == second_suffix:
            return first, second
    return None


class RareWords:
    """Finds files such as J.Brown.jpg and J.Smith.jpg, which readers take for one sample.

    Files of one key and one last extension are members of one sample if the words in between are
    those of other keys, too (0001.left.jpg and 0001.right.jpg), or are added to another file's name
    (0001.seg.png next to 0001.png). It keeps the distinct extensions of several parts in memory.
    """

    def __init__(self) -> None:
        # By extension of several parts, the number of keys that have it.
        self._key_counts = Counter[str]()
        # By extension, two files of one key that may be two samples; one of them has it.
        self._suspects: dict[str, tuple[str, str]] = {}

    def add(self, files: Mapping[str, str]) -> None:
        """Record the files of a key, by extension."""
        compound = [extension for extension in files if "." in extension]
        self._key_counts.update(compound)
        endings = {ending for extension in compound for ending in _endings(extension)}
        for first, second in _same_last_part(files):
            for extension in (first, second):
                # Words added to another name: this is `png` next to `seg.png`, or the reverse.
                ends_another = extension in endings
                extends_another = not files.keys().isdisjoint(_endings(extension))
                if not (ends_another or extends_another):
                    self._suspects.setdefault(extension, (files[first], files[second]))

    def merged_files(self) -> tuple[str, str] | None:
        """Return two files that differ by words that no other key has, if there are any."""
        for extension, files in self._suspects.items():
            if self._key_counts[extension] == 1:
                return files
        return None


def _same_last_part(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of extensions with the same last part: the first that has it, and each other."""
    first_with: dict[str, str] = {}
    for extension in files:
        _, _, last_part = extension.rpartition(".")
        first = first_with.setdefault(last_part, extension)
        if first != extension:
            yield first, extension


def _endings(extension: str) -> list[str]:
    """Return the shorter extensions at an extension's end: `nii.gz`, `gz` for `seg.nii.gz`."""
    parts = extension.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]
