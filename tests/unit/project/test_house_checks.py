"""The checks of `make house`: each finds what it is for, and leaves its good neighbour alone."""

from pathlib import Path

import pytest

import house_checks


def found(folder: Path, text: str) -> list[str]:
    path = folder / "module.py"
    path.write_text(text)
    return [finding.check for finding in house_checks.findings(path)]


LONG_FUNCTION = "def long():\n" + "    step()\n" * 50
DEEP = (
    "def deep():\n"
    + "".join(" " * 4 * depth + "if x:\n" for depth in range(1, 6))
    + " " * 24
    + "step()\n"
)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("x = 1\n" * 501, "file"),
        (LONG_FUNCTION, "function"),
        (DEEP, "nesting"),
        ("x = a if b else c if d else e\n", "conditional"),
        ("x = (\n    a\n    if b\n    else c\n)\n", "conditional"),
        ("a, b = 1, f()\n", "assignment"),
        ("if (x := f()) is not None:\n    pass\n", "walrus"),
        ("[f(x) for x in y]\n", "comprehension"),
        ("x = {1 for y in z if y}\n", "comprehension"),
        ("x = [1 for y in z if y]\n", "comprehension"),
        ("x = [f(y) for y in (z,)]\n", "comprehension"),
        ("x = 'wide' * is_wide\n", "product"),
        ("assert (a, b) == (1, 2)\n", "assertion"),
        ('"""What a module is for."""\n', "docstring"),
        ('class Place:\n    """Where it is."""\n', "docstring"),
        ('x = 1\n"""How many there are."""\n', "docstring"),
    ],
)
def test_each_check_finds_what_it_is_for(tmp_path: Path, text: str, check: str) -> None:
    """One short text for each."""
    assert found(tmp_path, text) == [check]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * 500,
        LONG_FUNCTION.removesuffix("    step()\n"),
        LONG_FUNCTION.removesuffix("    step()\n").replace(
            ":\n", ':\n    """A docstring.\n\n    It counts not.\n    """\n', 1
        ),
        "def flat():\n    if a:\n        f()\n" + "    elif b:\n        f()\n" * 6,
        "x = a if b else c\n",
        "a, b = b, a\n",
        "a, b = f()\n",
        "while x := f():\n    pass\n",
        "x = sum(1 for y in z)\n",
        "x = {y: 1 for y in z}\n",
        "x = [[] for y in z]\n",
        "x = '-' * len(y)\n",
        "x = '-' * 80\n",
        'def place():\n    """Return where it is."""\n',
        'class Whatever:\n    """A noun."""\n',
    ],
)
def test_plain_code_passes(tmp_path: Path, text: str) -> None:
    """Similar code that reads well."""
    assert found(tmp_path, text) == []


def test_density_counts_code_without_comments_and_docstrings(tmp_path: Path) -> None:
    """A line of each kind; blank lines and layout count nowhere."""
    path = tmp_path / "module.py"
    path.write_text('"""Words."""\n\n# more words\nx = a if b else c\ny, z = 1, 2\n')
    density = house_checks.Density()
    density.add(path)
    expected = house_checks.Density(
        files=1,
        tokens=15,
        code_lines=2,
        characters=len("x = a if b else c") + len("y, z = 1, 2"),
        lines=5,
        tuple_assignments=1,
        conditionals=1,
    )
    assert density == expected
