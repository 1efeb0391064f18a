"""Search for files that would become one sample, although their names suggest several samples.

A sample's key ends at the first dot of a file's name, so `J.Brown.jpg` and `J.Smith.jpg` would
become one sample, `J`. A file's extension is everything after the first dot, such as `Brown.jpg`.
It may have several parts, separated by dots: the last part is the file's format, and the parts
before it are called words here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations


def find_numbered_pair(extensions: Sequence[str]) -> tuple[str, str] | None:
    """Return two extensions of one key that differ by a number at the beginning, or None.

    Either both begin with a number, as in `1.png` and `2.json`, or one does and both have the same
    last part. Extensions that begin with words, as in `left.png` and `right.png`, are not found:
    they name members of one sample.
    """
    if not any(extension[:1].isdigit() for extension in extensions):
        return None
    for first, second in combinations(extensions, 2):
        first_words, _, first_format = first.rpartition(".")
        second_words, _, second_format = second.rpartition(".")
        if first_words == second_words:
            continue
        is_first_numbered = first_words[:1].isdigit()
        is_second_numbered = second_words[:1].isdigit()
        if is_first_numbered and is_second_numbered:
            return first, second
        if (is_first_numbered or is_second_numbered) and first_format == second_format:
            return first, second
    return None


class MergeFinder:
    """Finds files such as J.Brown.jpg and J.Smith.jpg, given the files of every key.

    Two files with the same key and the same format are probably two samples, unless

    - other keys have the words, too, as in 0001.left.jpg and 0001.right.jpg, or
    - the words are added to another file's name, as in 0001.seg.png next to 0001.png.

    Memory is needed for each distinct extension of several parts.
    """

    def __init__(self) -> None:
        # For each extension of several parts, the number of keys that have it.
        self._key_counts = Counter[str]()
        # By the extension of one of them, two files of one key. They are two samples if no other
        # key has that extension.
        self._suspects: dict[str, tuple[str, str]] = {}

    def add(self, paths: Mapping[str, str]) -> None:
        """Add the files of one key: the path of each file by its extension."""
        compound = [extension for extension in paths if "." in extension]
        self._key_counts.update(compound)
        endings: set[str] = set()
        for extension in compound:
            endings.update(_shorter_endings(extension))
        for first, second in _pairs_of_one_format(paths):
            for extension in (first, second):
                # Like `seg.png` if there is a `png`, too.
                adds_words = not paths.keys().isdisjoint(_shorter_endings(extension))
                # Like `png` if there is a `seg.png`, too.
                has_words_added = extension in endings
                if not (adds_words or has_words_added):
                    self._suspects.setdefault(extension, (paths[first], paths[second]))

    def merged_files(self) -> tuple[str, str] | None:
        """Return two files with one key that are probably two samples, or None.

        To be called when the files of all keys were added.
        """
        for extension, paths in self._suspects.items():
            if self._key_counts[extension] == 1:
                return paths
        return None


def _pairs_of_one_format(extensions: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of extensions with the same last part.

    A pair is the first extension with a last part, and each other extension that has it.
    """
    first_by_format: dict[str, str] = {}
    for extension in extensions:
        _, _, last_part = extension.rpartition(".")
        first = first_by_format.setdefault(last_part, extension)
        if first != extension:
            yield first, extension


def _shorter_endings(extension: str) -> list[str]:
    """Return the shorter extensions that an extension ends with: `seg.nii.gz` → `nii.gz`, `gz`."""
    parts = extension.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]
