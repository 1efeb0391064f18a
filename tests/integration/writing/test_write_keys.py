"""Files with several dots in their names, of which words may tell samples or members."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardcache.cli.common import USAGE
from support.programs.cli import shardcache
from support.shards.tars import samples

ALONE = ("--workers", "1")  # a process costs half a second of a core


def folder_of(place: Path, names: Sequence[str]) -> Path:
    """Make a folder of files, each of which contains its own name."""
    folder = place / "photos"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
    return folder


def test_files_told_apart_by_words_of_no_other_sample_are_refused(tmp_path: Path) -> None:
    """Names of people: the error names two files and the option for them; nothing is written."""
    names = ("J.Brown.jpg", "J.Smith.jpg", "K.Jones.jpg")
    ran = shardcache("write", *ALONE, folder_of(tmp_path, names), tmp_path / "out")
    assert ran.code == USAGE
    assert "'J.Brown.jpg' and 'J.Smith.jpg'" in ran.err
    assert "--key-at last-dot" in ran.err
    assert not (tmp_path / "out").exists()


def test_files_told_apart_by_rare_words_are_one_sample_if_asked_for(tmp_path: Path) -> None:
    """A user may say that they are members."""
    folder = folder_of(tmp_path, ("J.Brown.jpg", "J.Smith.jpg"))
    ran = shardcache("write", *ALONE, folder, tmp_path / "out", "--key-at", "first-dot")
    assert ran.code == 0, ran.err
    assert samples(tmp_path / "out") == {
        "J": {"Brown.jpg": b"J.Brown.jpg", "Smith.jpg": b"J.Smith.jpg"}
    }


MEMBERS = {
    "added to a name": ("0001.json", "0001.png", "0001.seg.png", "0002.png"),
    "kinds of all samples": ("0001.left.jpg", "0001.right.jpg", "0002.left.jpg", "0002.right.jpg"),
    "kinds that some lack": ("0001.left.jpg", "0001.right.jpg", "0002.left.jpg", "0003.right.jpg"),
    "double suffixes": ("0001.nii.gz", "0001.seg.nii.gz", "0002.nii.gz"),
    "other formats": ("0001.jpg", "0001.meta.json", "0002.jpg"),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [pytest.param(names, id=kind) for kind, names in MEMBERS.items()])
def test_members_with_several_dots_become_one_sample(tmp_path: Path, names: Sequence[str]) -> None:
    """Kinds of members, as WebDataset's users name them, need no option."""
    ran = shardcache("write", *ALONE, folder_of(tmp_path, names), tmp_path / "out")
    assert ran.code == 0, ran.err
    found = samples(tmp_path / "out")
    assert sorted(f"{key}.{extension}" for key in found for extension in found[key]) == sorted(
        names
    )
