"""The documents: commands and code are valid, and the tests that they name exist."""

import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator

import click

from shardcache.cli.main import app
from shardcache.config.origin_table import OriginTable
from shardcache.config.settings import Settings
from shardcache_client.dataset import ShardDataset
from support import ROOT
from support.programs.pages import blocks, without_blocks

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_INDENTED = re.compile(r"^(?: {4}.*\n)+", re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SHELL = {"sh", "bash", "console", "shell"}
_ENDS = {"|", "||", "&", "&&", ";", ">", "<", "2>", ">>"}
# What comes before the word where it names a package, a user, a unit or a namespace.
_NOT_RUN = re.compile(
    r"^-(?!-$)|install|namespace|secret|restart|status|stop|start|enable|daemonset|upgrade|user"
)


def lines_to_type(page: str) -> Iterator[str]:
    """Yield possible command lines: shell blocks, indented lines, code in sentences."""
    prose = without_blocks(page)
    typed = [
        *(block.body for block in blocks(page, *_SHELL)),
        *(_INDENTED.findall(prose)),
        *_INLINE.findall(_INDENTED.sub("", prose)),
    ]
    for block in typed:
        yield from block.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of `shardcache` in a line."""
    try:
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:  # a quotation mark of English
        return
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if (word == "shardcache" or word.endswith("bin/shardcache")) and not _NOT_RUN.search(
            before
        ):
            rest = words[place + 1 :]
            end = next((at for at, each in enumerate(rest) if each in _ENDS), len(rest))
            yield [each.rstrip(";") for each in rest[:end]]


def complaint(args: list[str]) -> str:
    """Return what click has against arguments of `shardcache`; "" for nothing."""
    name, *rest = args
    if name not in app.commands:
        return (
            "" if name.startswith("-") or not re.fullmatch(r"[a-z]+", name) else "no such command"
        )
    command: click.Command = app.commands[name]
    if isinstance(command, click.Group):
        below = command.commands.get(rest[0] if rest else "")
        if below is None:
            return "no such command" if rest else ""
        command = below
        rest = rest[1:]
    context = click.Context(
        command, info_name=name, parent=click.Context(app), **command.context_settings
    )
    try:
        command.make_parser(context).parse_args(rest)
    except click.NoSuchOption as exn:
        return exn.format_message()
    except click.BadOptionUsage:  # an option named in a sentence, without its value
        return ""
    return ""


def test_commands_take_what_the_documents_give_them() -> None:
    """Every `shardcache COMMAND --option` in README and docs is one that the command line knows."""
    told = [
        (page.name, args)
        for page in PAGES
        for line in lines_to_type(page.read_text())
        for args in commands(line)
    ]
    calls = [(page, args) for page, args in told if args]
    assert len(calls) > 80
    complaints = [(page, " ".join(args), complaint(args)) for page, args in calls]
    assert [(page, call, wrong) for page, call, wrong in complaints if wrong] == []


def test_extras_of_the_documents_exist() -> None:
    """Every `pip install` of this project names extras that it has."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()
    named = [
        found
        for page in PAGES
        for found in re.findall(r"(?:'\.|shardcache)\[([\w,]+)\]", page.read_text())
    ]
    assert len(named) > 5
    assert {extra for found in named for extra in found.split(",")} - extras == set()


def test_variables_of_the_documents_exist() -> None:
    """No document names a SHARDCACHE_ variable that nothing reads."""
    known = {f"SHARDCACHE_{name.upper()}" for name in Settings.model_fields}
    known |= {
        "SHARDCACHE_CONFIG",
        "SHARDCACHE_JOB",
        "SHARDCACHE_DIRECT_DIR",
        "SHARDCACHE_TUNE_MALLOC",
    }
    named = {
        name
        for page in PAGES
        for name in re.findall(r"\bSHARDCACHE_[A-Z_]*[A-Z]\b", page.read_text())
    }
    assert named - known == set()


def test_config_files_of_the_documents_are_read() -> None:
    """Every piece of a config file that is shown is TOML, and has keys that the daemon knows."""
    for page in PAGES:
        for block in blocks(page.read_text(), "toml"):
            table = tomllib.loads(block.body)
            assert table.keys() - Settings.model_fields.keys() == set(), page.name
            origins = [OriginTable.model_validate(each) for each in table.get("origin", ())]
            rules = [each for each in table.get("allow", ()) if isinstance(each, dict)]
            assert origins or rules or table, page.name
            assert {key for rule in rules for key in rule} <= {"prefix", "users", "groups"}


def test_python_of_the_documents_is_python() -> None:
    """Every piece of Python parses, and gives the dataset no argument that it does not take."""
    known = inspect.signature(ShardDataset).parameters.keys()
    given: list[str] = []
    for page in PAGES:
        text = page.read_text()
        trees = [ast.parse(block.body) for block in blocks(text, "python")]
        # In a sentence, `ShardDataset(…, zero_copy=True)` leaves out what does not matter.
        for tree in trees:
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            given += [
                kw.arg or ""
                for call in calls
                if getattr(call.func, "id", "") == "ShardDataset"
                for kw in call.keywords
            ]
        for sentence in re.findall(r"`ShardDataset\(([^`]*)\)`", text):
            given += re.findall(r"(\w+)=", sentence)
    assert len(given) > 15
    assert set(given) - known == set()


def written() -> set[str]:
    """Return the names of all tests, and of the classes of those that hypothesis writes."""
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {
        name for text in texts for name in re.findall(r"(?:def|class) (test_\w+|Any\w+)\(", text)
    }


def test_each_promise_has_a_test() -> None:
    """A promise whose tests were renamed or dropped is a promise without a test."""
    table = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    promises = {promise: tests for section in table.values() for promise, tests in section.items()}
    assert len(promises) > 200
    assert [promise for promise, tests in promises.items() if not tests] == []
    assert {name for tests in promises.values() for name in tests} - written() == set()


def test_tests_that_a_page_names_exist() -> None:
    """A page that names a test as its proof has one."""
    pages = (path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert {
        name for page in pages for name in re.findall(r"`(test_\w+)`", page)
    } - written() == set()


def test_installed_files_name_no_page_of_the_repository() -> None:
    """Users of a wheel do not have the docs/ page that a docstring or message would name."""
    paths = [
        path for package in ("shardcache", "client") for path in (ROOT / package).rglob("*.py")
    ]
    assert len(paths) > 100
    assert [str(path) for path in paths if re.search(r"\bdocs/|\w\.md\b", path.read_text())] == []


def test_the_architecture_names_files_and_functions_that_exist() -> None:
    """Whoever follows its map arrives: each file is there, and has what the page says is in it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    sources = [
        path
        for folder in ("shardcache", "client", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]

    def named(name: str) -> list[str]:
        return [path.read_text() for path in sources if f"/{path}".endswith(f"/{name}")]

    files = set(re.findall(r"`([\w./]+\.py)`", page))
    assert len(files) > 50
    assert [name for name in files if not named(name)] == []

    places = re.findall(r"`([A-Za-z_.]+)` in `([\w./]+\.py)`", page)
    assert len(places) > 15
    for name, file in places:
        definition = re.compile(rf"\b(?:def|class) {name.rpartition('.')[2]}\b")
        assert any(map(definition.search, named(file))), (name, file)
