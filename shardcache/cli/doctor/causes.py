"""Findings for errors of object stores: the cause of each kind of error, with the endpoint.

A finding is a line of the doctor's report; `store_checks` calls `store_failure` to get one. The
endpoint is the url of the store's server. If an option or a variable sets it, the finding names
that, since a wrong endpoint is a common cause. An [[origin]] table of the config file has options
for the urls that begin with its `match`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardcache.access.protocols import row_of
from shardcache.access.urls import protocol_of
from shardcache.cli.doctor.context import Finding, error_finding
from shardcache.config.origin_table import OriginTable
from shardcache.shared import exceptions
from shardcache.shared.exceptions import ShardcacheError

# The cause of each class of errors; the first class that fits counts, so subclasses come first.
_CAUSES: tuple[tuple[type[ShardcacheError], str], ...] = (
    (
        exceptions.NotFoundError,
        "nothing is stored under this url: it is misspelt, or was not uploaded",
    ),
    (exceptions.AccessDeniedError, "the credentials are wrong, or may not read this url"),
    (exceptions.NotAllowedError, "the daemon's --allow rules do not permit this url to you"),
    (exceptions.MissingPackageError, "the package that reads such urls is not installed"),
    (exceptions.NotAnIndexError, "the file is JSON of another kind, or damaged"),
    (exceptions.OriginBusyError, "the object store gets more requests than it accepts"),
    (exceptions.OriginUnavailableError, "after --attempts of these, readers get this error"),
    (exceptions.OriginError, "no retry would help: readers get this error at once"),
    (exceptions.ConfigError, "the daemon refuses such urls, or cannot use an option for them"),
)

# Name of the option for the endpoint, in an [[origin]] table and in its `storage_options`.
_ENDPOINT_SETTING = "endpoint_url"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of an object store that an option or a variable sets.

    Attributes:
        url: url of the endpoint.
        setting: what sets the endpoint: the name of a variable, or an option in words.
    """

    url: str
    setting: str


def configured_endpoint(
    url: str, table: OriginTable, environment: Mapping[str, str]
) -> Endpoint | None:
    """Return the endpoint that an option or a variable sets for a url.

    Returns None if requests go to the provider's endpoint, or to a host that the url names.

    Args:
        url: the url.
        table: the [[origin]] table of the url.
        environment: variables of the process that makes requests.
    """
    options = table.storage_options
    client_options: Mapping[str, object] = options.get("client_kwargs", {})
    in_table = (
        table.endpoint_url
        or options.get(_ENDPOINT_SETTING)
        or client_options.get(_ENDPOINT_SETTING)
    )
    if in_table:
        place = "the [[origin]] table"
        if table.match:
            place += f" for {table.match}"
        return Endpoint(str(in_table), f"`{_ENDPOINT_SETTING}` in {place}")
    protocol = row_of(protocol_of(url))
    ignores_variables = environment.get(protocol.provider_variable, "").lower() == "true"
    if ignores_variables:
        return None
    for name in protocol.endpoint_variables:
        if environment.get(name):
            return Endpoint(environment[name], name)
    return None


def store_failure(
    error: ShardcacheError,
    url: str,
    *,
    table: OriginTable,
    environment: Mapping[str, str],
) -> Finding:
    """Return the finding for an error of a url's object store.

    Args:
        error: the error of a request.
        url: url of the request.
        table: the [[origin]] table of the url.
        environment: variables of the process that made the request.
    """
    causes = []
    remedy = error.remedy
    endpoint = configured_endpoint(url, table, environment)
    if endpoint is not None and isinstance(error, exceptions.OriginError):
        causes.append(f"the endpoint {endpoint.url} is set by {endpoint.setting}")
        if isinstance(error, exceptions.OriginUnavailableError):
            remedy = f"correct {endpoint.setting}, if {endpoint.url} is wrong; else {remedy}"
    cause_of_class = _cause_of_class(error)
    if cause_of_class:
        causes.append(cause_of_class)
    if table.match:
        causes.append(f"accessed through the [[origin]] table for {table.match}")
    finding = error_finding(error, "; ".join(causes), remedy)
    return replace(finding, code=error.code)


def _cause_of_class(error: ShardcacheError) -> str:
    """Return the cause of an error's class; empty for a class that is not in `_CAUSES`."""
    for error_class, cause in _CAUSES:
        if isinstance(error, error_class):
            return cause
    return ""
