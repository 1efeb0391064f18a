"""Patterns that make a file slow to read: syntax checks, each with the line of a finding.

They say what code must not do, and limit no size but that of files and functions. A place that is
right as it is has a row in `EXCEPTIONS`, with the reason.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_NESTING = 4
LONG_COLUMNS = 100
# A docstring names its subject: a noun phrase, or an imperative.
SUBJECTLESS = {"How", "That", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BLOCKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("client/shardcache_client/reader.py", "function"): "a dataset's 27 arguments are a line each",
}
"""By file and check, the reason why a finding is right as it is."""


class Finding(NamedTuple):
    """A place that is slow to read."""

    line: int
    check: str
    what: str


def findings(path: Path) -> list[Finding]:
    """Return what the checks find in a Python file, in the order of its lines."""
    text = path.read_text()
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = list(_of_file(text))
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            found += _of_function(node)
        elif isinstance(node, ast.IfExp):
            found += _of_conditional(node)
        elif isinstance(node, ast.Assign):
            found += _of_assignment(node)
        elif isinstance(node, ast.NamedExpr):
            found += _of_walrus(node, parents[node])
        elif isinstance(node, _COMPREHENSIONS):
            found += _of_comprehension(node, parents[node])
        elif isinstance(node, ast.BinOp):
            found += _of_product(node)
        elif isinstance(node, ast.Starred):
            found += _of_splat(node)
        elif isinstance(node, ast.Expr):
            found += _of_docstring(node)
        elif isinstance(node, ast.Assert):
            found += _of_assertion(node)
    return sorted(found)


def _of_file(text: str) -> Iterator[Finding]:
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield Finding(1, "file", f"{lines} lines, more than {MAX_FILE_LINES}")


def _of_function(node: Function) -> Iterator[Finding]:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1 - _docstring_length(node)
    if lines > MAX_FUNCTION_LINES:
        what = f"{node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"
        yield Finding(node.lineno, "function", what)
    depth = _nesting(node)
    if depth > MAX_NESTING:
        what = f"{node.name} nests {depth} blocks, more than {MAX_NESTING}"
        yield Finding(node.lineno, "nesting", what)


def _docstring_length(node: Function) -> int:
    """Return the number of lines of a docstring, which is no part of a function's code."""
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def _nesting(node: ast.AST, depth: int = 0) -> int:
    """Return how deep blocks nest below a node; an `elif` is as deep as its `if`."""
    deepest = depth
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else []
        is_elif = isinstance(node, ast.If) and name == "orelse" and len(children) == 1
        for child in children:
            if isinstance(child, _BLOCKS):
                is_same = is_elif and isinstance(child, ast.If)
                deepest = max(deepest, _nesting(child, depth if is_same else depth + 1))
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                deepest = max(deepest, _nesting(child, depth))
    return deepest


def _of_conditional(node: ast.IfExp) -> Iterator[Finding]:
    parts = [each for child in ast.iter_child_nodes(node) for each in ast.walk(child)]
    if any(isinstance(each, ast.IfExp) for each in parts):
        yield Finding(node.lineno, "conditional", "a conditional expression within another")
    if node.lineno != node.end_lineno:
        yield Finding(node.lineno, "conditional", "a conditional expression over several lines")


def _of_assignment(node: ast.Assign) -> Iterator[Finding]:
    """Find a tuple that is assigned to a tuple; a swap names the same things on both sides."""
    for target in node.targets:
        if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
            continue
        assigned = sorted(map(ast.unparse, target.elts))
        values = sorted(map(ast.unparse, node.value.elts))
        if assigned != values:
            yield Finding(node.lineno, "assignment", "several values assigned in one statement")


def _of_walrus(node: ast.NamedExpr, parent: ast.AST) -> Iterator[Finding]:
    is_condition = isinstance(parent, (ast.If, ast.While)) and parent.test is node
    if not is_condition:
        yield Finding(node.lineno, "walrus", "an assignment within a larger expression")


def _of_comprehension(node: ast.AST, parent: ast.AST) -> Iterator[Finding]:
    """Find comprehensions for their effect, over one item, and without use of their variables."""
    assert isinstance(node, _COMPREHENSIONS)
    if isinstance(parent, ast.Expr):
        yield Finding(node.lineno, "comprehension", "a comprehension for its effect")
    for generator in node.generators:
        items = generator.iter
        if isinstance(items, (ast.Tuple, ast.List, ast.Set)) and len(items.elts) == 1:
            yield Finding(node.lineno, "comprehension", "a comprehension over one item")
    if isinstance(node, ast.GeneratorExp):  # sum(1 for …) counts
        return
    has_condition = any(generator.ifs for generator in node.generators)
    if isinstance(node, ast.ListComp) and not has_condition:  # [[] for …] repeats
        return
    variables = set().union(*(_names(generator.target) for generator in node.generators))
    if isinstance(node, ast.DictComp):
        used = _names(node.key) | _names(node.value)
    else:
        used = _names(node.elt)
    if not variables & used:
        yield Finding(node.lineno, "comprehension", "a comprehension as an `if`")


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _of_product(node: ast.BinOp) -> Iterator[Finding]:
    """Find a text that is multiplied by a truth value, as far as the syntax shows one."""
    if not isinstance(node.op, ast.Mult):
        return
    for text, number in ((node.left, node.right), (node.right, node.left)):
        if _is_text(text) and _is_truth(number):
            yield Finding(node.lineno, "product", "a text multiplied by a truth value")


def _of_splat(node: ast.Starred) -> Iterator[Finding]:
    """A literal whose items could be written where it is unpacked."""
    if isinstance(node.value, ast.Tuple | ast.List | ast.Set):
        yield Finding(node.lineno, "literal unpacked where it is written", ast.unparse(node))


def _of_docstring(node: ast.Expr) -> Iterator[Finding]:
    """Find a docstring, also one of an attribute, that begins with a clause without a noun."""
    text = node.value
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        first = text.value.split(maxsplit=1)[:1]
        if SUBJECTLESS.intersection(first):
            yield Finding(node.lineno, "docstring", f"a docstring that begins with {first[0]}")


def _of_assertion(node: ast.Assert) -> Iterator[Finding]:
    """Find tuples that are compared with each other: each pair of values is a claim of its own."""
    test = node.test
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Tuple):
        return
    if all(isinstance(other, ast.Tuple) for other in test.comparators):
        yield Finding(node.lineno, "assertion", "several claims in one assertion")


def _is_text(node: ast.AST) -> bool:
    is_literal = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_literal or isinstance(node, ast.JoinedStr)


def _is_truth(node: ast.AST) -> bool:
    """Return whether an expression is a truth value, as its syntax or its name says."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.Compare | ast.BoolOp):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith(("bool", "startswith", "endswith", "isinstance"))
    return ast.unparse(node).rpartition(".")[2].startswith(("is_", "has_", "may_", "was_"))


@dataclass(slots=True)
class Density:
    """Measures of the code lines of a room; none has a limit.

    Attributes:
        files: number of files.
        tokens: of the language, without comments and layout.
        code_lines: lines that are neither blank nor only comment or docstring.
        characters: of these, without indentation.
        long_lines: lines of `LONG_COLUMNS` columns or more, of all lines.
        lines: all lines.
        tuple_assignments: of several values in one statement.
        conditionals: conditional expressions.
    """

    files: int = 0
    tokens: int = 0
    code_lines: int = 0
    characters: int = 0
    long_lines: int = 0
    lines: int = 0
    tuple_assignments: int = 0
    conditionals: int = 0

    def add(self, path: Path) -> None:
        """Add a Python file."""
        text = path.read_text()
        lines = text.splitlines()
        self.files += 1
        self.lines += len(lines)
        self.long_lines += sum(1 for line in lines if len(line) >= LONG_COLUMNS)
        numbers = set()
        for token in _code_tokens(text):
            self.tokens += 1
            numbers.update(range(token.start[0], token.end[0] + 1))
        numbers -= _docstring_lines(text)
        self.code_lines += len(numbers)
        self.characters += sum(len(lines[number - 1].strip()) for number in numbers)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.IfExp):
                self.conditionals += 1
            elif isinstance(node, ast.Assign) and list(_of_assignment(node)):
                self.tuple_assignments += 1

    def row(self) -> str:
        """Return the measures in columns, as `HEADINGS` names them."""
        thousands = max(self.code_lines, 1) / 1000
        return (
            f"{self.files:>5} {self.tokens:>7,} {self.code_lines:>6,} "
            f"{self.characters / max(self.code_lines, 1):>6.1f} "
            f"{self.tuple_assignments / thousands:>7.1f} {self.conditionals / thousands:>7.1f} "
            f"{100 * self.long_lines / max(self.lines, 1):>6.1f}"
        )


HEADINGS = (
    f"{'files':>5} {'tokens':>7} {'code':>6} {'chars':>6} "
    f"{'tuples':>7} {'if-else':>7} {'long %':>6}"
)
"""Files, tokens, code lines and their length; tuple assignments, conditionals and long lines."""

_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    },
)


def _code_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            yield token


def _docstring_lines(text: str) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            assert node.end_lineno is not None
            numbers.update(range(node.lineno, node.end_lineno + 1))
    return numbers
