"""Findings for errors of object stores: the cause of each kind of error, with the endpoint.

`store_checks` calls `failure`. The endpoint is the url of the store's server. If it is not the
provider's, the finding names the setting that sets it, since a wrong endpoint is a common cause.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardcache import errors
from shardcache.access.protocols import row_of
from shardcache.access.urls import protocol_of
from shardcache.cli.doctor.context import Finding, finding_of
from shardcache.config.origin_table import OriginTable
from shardcache.errors import ShardcacheError

# The cause of each class of errors. Subclasses come before their base classes.
_CAUSES: tuple[tuple[type[ShardcacheError], str], ...] = (
    (errors.NotFoundError, "nothing is stored under this url: it is misspelt, or was not uploaded"),
    (errors.AccessDeniedError, "the credentials are wrong, or may not read this url"),
    (errors.NotAllowedError, "the daemon's --allow rules do not permit this url to you"),
    (errors.MissingPackageError, "the package that reads such urls is not installed"),
    (errors.NotAnIndexError, "the file is JSON of another kind, or damaged"),
    (errors.OriginBusyError, "the object store gets more requests than it accepts"),
    (errors.OriginUnavailableError, "after --attempts of these, readers get this error"),
    (errors.OriginError, "no retry would help: readers get this error at once"),
    (errors.ConfigError, "the daemon refuses such urls, or cannot use an option for them"),
)

# Name of the endpoint's setting, in an [[origin]] table and in its `storage_options`.
_ENDPOINT_SETTING = "endpoint_url"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An object store's endpoint that is not its provider's.

    Attributes:
        url: url of the endpoint.
        setting: the setting that names the endpoint, in words or as a variable.
    """

    url: str
    setting: str


def endpoint_of(url: str, table: OriginTable, environment: Mapping[str, str]) -> Endpoint | None:
    """Return the endpoint that is set for a url.

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
        place = f"the [[origin]] table for {table.match}" if table.match else "the [[origin]] table"
        return Endpoint(str(in_table), f"`{_ENDPOINT_SETTING}` in {place}")
    row = row_of(protocol_of(url))
    uses_provider = environment.get(row.provider_variable, "").lower() == "true"
    if uses_provider:
        return None
    for name in row.endpoint_variables:
        if environment.get(name):
            return Endpoint(environment[name], name)
    return None


def failure(
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
    cause_of_kind = next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "")
    causes = [cause_of_kind]
    if table.match:
        causes.append(f"accessed through the [[origin]] table for {table.match}")
    endpoint = endpoint_of(url, table, environment)
    remedy = error.remedy
    if endpoint is not None and isinstance(error, errors.OriginError):
        causes.insert(0, f"the endpoint {endpoint.url} is set by {endpoint.setting}")
        if isinstance(error, errors.OriginUnavailableError):
            remedy = f"correct {endpoint.setting}, if {endpoint.url} is wrong; else {remedy}"
    finding = finding_of(error, "; ".join(filter(None, causes)), remedy)
    return replace(finding, code=error.code)
