"""Queries of the shipped Grafana dashboard and alert rules."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from support import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "shardcache.json"
RULES = ROOT / "deploy" / "prometheus" / "shardcache.rules.yml"

OF_THE_TARGET = {"instance", "job"}  # what Prometheus adds to each sample of a target

_METRIC = re.compile(r"\b((?:shardcache|process)_\w+|up)\b(?:\{([^}]*)\})?")
_BY = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_WITHOUT = re.compile(r"\b(?:without|ignoring)\s*\((\w+)\)")
_SHOWN = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression.

    Attributes:
        shown: labels that its legend or its texts name, or that it sums over; some of its metrics
            have them.
    """

    where: str  # panel or alert that it is of
    expr: str
    shown: frozenset[str]

    def metrics(self) -> dict[str, set[str]]:
        """Return the metrics that it names, each with the labels that it has to have for that."""
        grouped = {label.strip() for group in _BY.findall(self.expr) for label in group.split(",")}
        found: dict[str, set[str]] = {}
        for name, matchers in _METRIC.findall(self.expr):
            matched = set(re.findall(r"(\w+)\s*[=!]", re.sub(r'"[^"]*"', '""', matchers)))
            found.setdefault(name, set()).update(matched, grouped - {"le"})
        return found


def panels() -> Iterator[Query]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield _query(panel["title"], target["expr"], _SHOWN.findall(target["legendFormat"]))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", variable["definition"]
            ).groups()  # type: ignore[union-attr]
            yield _query(variable["name"], f"count by ({label}) ({metric})", [])


def alerts() -> Iterator[Query]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            shown = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
            yield _query(rule["alert"], rule["expr"], shown)


def _query(where: str, expr: str, shown: list[str]) -> Query:
    return Query(where, expr, frozenset(shown) | frozenset(_WITHOUT.findall(expr)))
