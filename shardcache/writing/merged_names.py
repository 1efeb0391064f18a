"""Names of files that would become one sample, although they suggest several samples.

A sample's key ends at the first dot of a file's name, so `J.Brown.jpg` and `J.Smith.jpg` would
become the sample `J`. `folders` asks these functions for two files that were merged by mistake. A
file's extension is everything after the first dot, such as `Brown.jpg`; it may have several parts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations


def numbers_apart(extensions: Sequence[str]) -> tuple[str, str] | None:
    """Return two extensions of a sample that differ by a number at the beginning, or None.

    Either both begin with a number, or one does and both have the same suffix. Extensions that
    begin with words, as in `left.png` and `right.png`, name members of one sample.
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

    Two files with the same key and the same last part are probably two samples, with two
    exceptions. Either other keys have the words in between, too, as in 0001.left.jpg and
    0001.right.jpg, or the words are added to another file's name, as in 0001.seg.png next to
    0001.png.

    Memory is needed for each distinct extension of several parts.
    """

    def __init__(self) -> None:
        # For each extension of several parts, the number of keys that have it.
        self._key_counts = Counter[str]()
        # By extension, two files of one key that may be two samples. One of the files has the
        # extension.
        self._suspects: dict[str, tuple[str, str]] = {}

    def add(self, files: Mapping[str, str]) -> None:
        """Record the files of one key, given by their extensions."""
        compound = [extension for extension in files if "." in extension]
        self._key_counts.update(compound)
        endings = {ending for extension in compound for ending in _endings(extension)}
        for first, second in _same_last_part(files):
            for extension in (first, second):
                has_added_words = not files.keys().isdisjoint(_endings(extension))  # like seg.png
                is_added_to = extension in endings  # like png, next to seg.png
                if not (has_added_words or is_added_to):
                    self._suspects.setdefault(extension, (files[first], files[second]))

    def merged_files(self) -> tuple[str, str] | None:
        """Return two files that differ by words that no other key has, or None."""
        for extension, files in self._suspects.items():
            if self._key_counts[extension] == 1:
                return files
        return None


def _same_last_part(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of extensions with the same last part.

    A pair is the first extension with a last part, and each other extension that has it.
    """
    first_with: dict[str, str] = {}
    for extension in files:
        _, _, last_part = extension.rpartition(".")
        first = first_with.setdefault(last_part, extension)
        if first != extension:
            yield first, extension


def _endings(extension: str) -> list[str]:
    """Return the shorter extensions that an extension ends with: `seg.nii.gz` → `nii.gz`, `gz`."""
    parts = extension.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]
