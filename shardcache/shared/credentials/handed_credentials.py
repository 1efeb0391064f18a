"""Credentials in the environment that each session hands over to its user's private daemon.

A private daemon is one that a reader has started for its own user. The name of its socket does not
depend on the values of these credentials, but only on their kinds. The client imports this module,
so it uses the standard library alone.
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
    for credentials_type in KINDS:
        credentials = credentials_type.of(environment)
        if credentials is not None:
            variables |= credentials.variables
    return variables


def handed_kinds(environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the `names` of the credentials in an environment, by their `kind`."""
    names_by_kind: dict[str, tuple[str, ...]] = {}
    for credentials_type in KINDS:
        credentials = credentials_type.of(environment)
        if credentials is not None:
            names_by_kind[credentials.kind] = credentials.names
    return names_by_kind
