"""Credentials in the environment that each session hands over to its user's private daemon.

A private daemon is one that a reader has started for its own user. The name of its socket does not
depend on the values of these credentials, but only on labels that stand for them. The client
imports this module, so it uses the standard library alone.
"""

from collections.abc import Mapping

from shardcache.shared.credentials.aws_keys import AwsKeys
from shardcache.shared.credentials.azure_secret import AzureSecret
from shardcache.shared.credentials.google_key import GoogleKey
from shardcache.shared.credentials.hub_token import HubToken

Credentials = AwsKeys | AzureSecret | GoogleKey | HubToken
"""One session's credentials for one provider."""

KINDS: tuple[type[Credentials], ...] = (AwsKeys, AzureSecret, GoogleKey, HubToken)
"""The class of each provider's credentials."""


def handed_over(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a process with this environment hands over: values by variable."""
    variables: dict[str, str] = {}
    for credentials_type in KINDS:
        credentials = credentials_type.of(environment)
        if credentials is not None:
            variables |= credentials.variables
    return variables


def handed_labels(environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the `label` of each credentials in an environment, with their variables' `names`."""
    names_by_label: dict[str, tuple[str, ...]] = {}
    for credentials_type in KINDS:
        credentials = credentials_type.of(environment)
        if credentials is not None:
            names_by_label[credentials.label] = credentials.names
    return names_by_label
