"""Credentials in the environment that each session hands over to its user's private daemon.

Their values do not name the daemon. The standard library alone.
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
        found = kind.of(environment)
        if found is not None:
            variables |= found.variables
    return variables


def handed_kinds(environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of these credentials, with all variables that may differ between them."""
    found = [kind.of(environment) for kind in KINDS]
    return {each.kind: each.names for each in found if each is not None}
