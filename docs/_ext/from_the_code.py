"""Pages of the site that are made of the code: commands, settings, errors, and the files that lie beside the documents.

{commands}                 a section each, with every argument and option
{settings} Settings        each field: flag, variable, key, default, limits, meaning
{errors}                   each exception: its code, what it means, what to do
{metrics}                  each metric: its type, labels and help
{files} ../deploy/slurm    what lies in a folder, to download
"""

import inspect
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
from docutils import nodes
from prometheus_client import ProcessCollector
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shardcache.cli.main import app as shardcache
from shardcache.cli.starting.serve import serve
from shardcache.config import settings as config
from shardcache.errors import ShardcacheError
from shardcache.server.metrics.prometheus import measured_metrics, page_metrics
from shardcache.telemetry.metrics import Histogram, Measures

DOCS = Path(__file__).parents[1]

# A paragraph that click leaves as it is.
_UNWRAPPED = re.compile(r"\x08\n(.*?)(?=\n\n|$)", re.DOTALL)

# Links that lead out of docs/ on the repository's page, and where they lead on the site.
_ON_THE_SITE = (
    (re.compile(r"\]\(\.\./(CHANGELOG|CONTRIBUTING)\.md\)"), lambda found: f"]({found[1].lower()}.md)"),
    (re.compile(r"\]\(\.\./(deploy/[a-z]+)\)"), lambda found: f"](files.md#{found[1].replace('/', '-')})"),
    (re.compile(r"\]\(examples\)"), "](files.md#examples)"),
)


class Entries(SphinxDirective):
    """A list of names with a line or more each; every name can be linked to."""

    def entry(self, name: str, *lines: str, anchor: str = "") -> nodes.definition_list_item:
        """Return one entry, whose lines are Markdown."""
        anchor = nodes.make_id(anchor or name)
        term = nodes.term("", "", nodes.literal(name, name), ids=[anchor])
        self.env.domains.standard_domain.note_hyperlink_target(anchor, self.env.docname, anchor, name)
        body = nodes.definition()
        for line in lines:
            body += self.parse_text_to_nodes(line)
        return nodes.definition_list_item("", term, body)


class Commands(Entries):
    """Every command of the command line, in the order of `shardcache --help`."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each."""
        root = click.Context(shardcache, info_name="shardcache", **shardcache.context_settings)
        return [self._command(each) for each in _commands(root)]

    def _command(self, context: click.Context) -> nodes.section:
        command = context.command
        name = context.command_path.partition(" ")[2]
        anchor = name.replace(" ", "-")
        usage = command.get_usage(context).removeprefix("Usage: ")
        section = nodes.section("", nodes.title(text=name), ids=[anchor])
        section += nodes.literal_block(usage, usage, language="text")
        text = f"{inspect.cleandoc(command.help or '')}\n\n{command.epilog or ''}"
        section += self.parse_text_to_nodes(_UNWRAPPED.sub(r"```text\n\1\n```", text))
        records = (param.get_help_record(context) for param in command.get_params(context))
        options = [self._option(anchor, *record) for record in records if record]
        section += nodes.definition_list("", *options)
        return section

    def _option(self, command: str, names: str, text: str) -> nodes.definition_list_item:
        return self.entry(names, text, anchor=f"{command}{names.split()[0].rstrip(',')}")


class Settings(Entries):
    """The fields of a model of `shardcache.config.settings`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the list of fields."""
        model: type[BaseModel] = getattr(config, self.arguments[0])
        flags = {param.name: param for param in serve.get_params(click.Context(serve))}
        prefix = config.VARIABLE_PREFIX if model is config.Settings else ""  # tables are in the file alone
        fields = ((name, field, _ways(name, flags, prefix)) for name, field in model.model_fields.items())
        return [nodes.definition_list("", *(self._field(*field) for field in fields))]

    def _field(self, name: str, field: FieldInfo, ways: str) -> nodes.definition_list_item:
        text, _, default = (field.description or "").partition(" [default: ")
        facts = [default.rstrip("]") or _default(field), *_limits(field)]
        lines = [f"{text[:1].upper()}{text[1:]}.", ways, f"Default: {'; '.join(facts)}."]
        return self.entry(name.replace("_", "-") if ways else name, *filter(None, lines))


def _commands(context: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of the commands below a group's, or that of a command."""
    if not isinstance(context.command, click.Group):
        yield context
        return
    for command in context.command.commands.values():
        yield from _commands(click.Context(command, parent=context, info_name=command.name))


def _ways(name: str, flags: dict[str | None, click.Parameter], prefix: str) -> str:
    flag = flags.get(name)
    if not prefix or flag is None:  # a key of the file alone
        return ""
    takes = flag.metavar or f"[{'|'.join(getattr(flag.type, 'choices', ()))}]"
    return f"`{flag.opts[0]} {takes}` · `{prefix}{name.upper()}` · `{name}` in the file"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, it has to be given"
    if field.default_factory is config.default_cache_dir:  # the page is for all, whoever builds it
        return "`/var/cache/shardcache` for root, `~/.cache/shardcache` for others"
    value = field.get_default(call_default_factory=True)
    shown = value.human_readable() if isinstance(value, ByteSize) else value
    return "none" if value in (None, (), {}) else f"`{str(shown).lower() if isinstance(value, bool) else shown}`"


def _limits(field: FieldInfo) -> Iterator[str]:
    in_bytes = "ByteSize" in str(field.annotation)
    for sign, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most")):
        for limit in (getattr(item, sign, None) for item in field.metadata):
            if limit is not None:
                yield f"{words} {ByteSize(limit).human_readable() if in_bytes else limit}"


class Errors(Entries):
    """Every exception of `shardcache.errors`, the general ones before those below them."""

    def run(self) -> list[nodes.Node]:
        """Return the list of exceptions."""
        return [nodes.definition_list("", *map(self._error, _family(ShardcacheError)))]

    def _error(self, kind: type[ShardcacheError]) -> nodes.definition_list_item:
        parent = "" if kind is ShardcacheError else f"; a `{kind.__bases__[0].__name__}`"
        again = "; asking again may help" if kind.retryable else ""
        lines = [(kind.__doc__ or "").partition("\n")[0], f"Code `{kind.code}`{parent}{again}."]
        if kind.default_remedy:
            lines.append(f"What to do: {kind.default_remedy}.")
        return self.entry(kind.__name__, *lines)


def _family(kind: type[ShardcacheError]) -> Iterator[type[ShardcacheError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == ShardcacheError.__module__:  # others are for the house alone
            yield from _family(child)


class Metrics(SphinxDirective):
    """Every metric of a daemon, from a scrape of one that has done nothing yet."""

    def run(self) -> list[nodes.Node]:
        """Return a table of names, types, labels and help."""
        page = defaultdict(lambda: defaultdict(float), origins=[], jobs=[], tiers=[], transfers=[])
        families = [
            *page_metrics(page),
            *measured_metrics(Measures(), Histogram(())),
            *ProcessCollector(registry=None).collect(),
        ]
        rows = (
            f"| `{family.name}{'_total' * (family.type == 'counter')}` | {family.type} "
            f"| {', '.join(f'`{name}`' for name in family._labelnames)} | {family.documentation} |"
            for family in families
        )
        return self.parse_text_to_nodes("\n".join(("| metric | type | labels | |", "| --- | --- | --- | --- |", *rows)))


class Files(SphinxDirective):
    """The files of a folder beside the documents, each to download."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a list of links."""
        folder = (DOCS / self.arguments[0]).resolve()
        found = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        links = (f"- [`{path.relative_to(folder)}`]({os.path.relpath(path, DOCS)})" for path in found)
        return self.parse_text_to_nodes("\n".join(links))


def _stay_on_the_site(_app: Sphinx, _docname: str, source: list[str]) -> None:
    for pattern, place in _ON_THE_SITE:
        source[0] = pattern.sub(place, source[0])


def _enter_sections(_app: Sphinx, doctree: nodes.document) -> None:
    """Have entries of the index lead to their section: the search shows what is below an anchor."""
    for entry in doctree.findall(addnodes.index):
        if isinstance(entry.parent, nodes.section):
            section = entry.parent["ids"][0]
            for target in {target for _, _, target, _, _ in entry["entries"]}:
                if target.startswith("index-"):  # others are those of what is described
                    _drop_anchor(entry.parent, target)
            entry["entries"] = [(kind, word, section, main, key) for kind, word, _, main, key in entry["entries"]]


def _drop_anchor(section: nodes.Element, anchor: str) -> None:
    """Remove the anchor that an entry had for itself: a table after it would have the same one twice."""
    for node in list(section.findall(nodes.Element)):
        if anchor in node.get("ids", ()):
            node["ids"].remove(anchor)
        if isinstance(node, nodes.target) and node.get("refid") == anchor:
            node.parent.remove(node)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    for directive in (Commands, Settings, Errors, Metrics, Files):
        app.add_directive(directive.__name__.lower(), directive)
    app.connect("source-read", _stay_on_the_site)
    app.connect("doctree-read", _enter_sections)
    return {"parallel_read_safe": True}
