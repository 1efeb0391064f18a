"""Credentials in the environment that each session hands over to its user's private daemon.

The name of the daemon's socket does not depend on their values. Uses the standard library alone.
"""

from collections.abc import Mapping

from shardcache.shared.credentials.aws_keys import AwsKeys
from shardcache.shared.credentials.azure_secret import AzureSecret
from shardcache.shared.credentials.google_key import GoogleKey
from shardcache.shared.credentials.hub_token import HubToken

Credentials = AwsKeys | AzureSecret | GoogleKey | HubToken
"""One session's credentials for one provider."""

KINDS: tuple[type[Credentials], ...] = (AwsKeys, AzureSecret, GoogleKey, HubToken)


def handed_over(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the credentials that a process with this environment hands over, by variable."""
    variables: dict[str, str] = {}
    for kind in KINDS:
        credentials = kind.of(environment)
        if credentials is not None:
            variables |= credentials.variables
    return variables


def handed_kinds(environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the `kind` of each of these credentials, with all variables that may belong to it."""
    names: dict[str, tuple[str, ...]] = {}
    for kind in KINDS:
        credentials = kind.of(environment)
        if credentials is not None:
            names[credentials.kind] = credentials.names
    return names
