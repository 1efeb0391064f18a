"""Which credentials an S3 store is asked with: where they come from, never what they are."""

from __future__ import annotations

from typing import Any

from botocore.credentials import Credentials

from shardcache.cli.doctor.case import Case
from shardcache.cli.doctor.findings import Finding, failed, of_error, ok
from shardcache.cli.doctor.people import me, user_name
from shardcache.config import OriginTable
from shardcache.errors import ShardcacheError
from shardcache.origin.s3_session import Sessions
from shardcache.redact import redact

_NAME = "store.credentials"
_CHAIN = (
    "the chain was asked to its end: storage_options, AWS_ACCESS_KEY_ID, web identity, SSO, ~/.aws/credentials and "
    "config, the container's role, the instance's role"
)
_REMEDY = "export AWS_PROFILE=NAME, or `profile` in an [[origin]] table; `anon = true` there for public data"

# What botocore calls the links of its chain.
_SOURCES = {
    "env": "AWS_ACCESS_KEY_ID in the environment",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS config file",
    "assume-role": "a role that is assumed",
    "assume-role-with-web-identity": "a role by web identity",
    "sso": "a single sign-on",
    "login": "a login",
    "custom-process": "a process of its own (credential_process)",
    "container-role": "the container's role",
    "iam-role": "the instance's role",
}


async def examine(case: Case, sessions: Sessions, table: OriginTable, url: str) -> Finding:
    """Follow the chain as the daemon does, renewing what can be renewed."""
    if table.anon or table.storage_options.get("anon"):
        return ok(_NAME, "none: the table says anon", subject=url)
    if table.storage_options.get("key"):
        return ok(_NAME, "storage_options of the [[origin]] table", subject=url)
    try:
        async with sessions.use(url) as fs:
            found: Credentials | None = await fs.session.get_credentials()
            if found is None:
                return failed(_NAME, f"{me()} has none", _CHAIN, _REMEDY, subject=url)
            frozen = await found.get_frozen_credentials()
            profile = fs.session.get_config_variable("profile")
    except ShardcacheError as exn:
        return of_error(_NAME, exn, f"the chain ends there, for {me()}", subject=url)
    except RuntimeError as exn:  # botocore's, for what it renewed and is no better
        return failed(_NAME, redact(str(exn)), "whoever issues them says they are over", _REMEDY, subject=url)
    return ok(_NAME, _told(case, found.method, profile, frozen), subject=url)


def _told(case: Case, method: str | None, profile: str | None, frozen: Any) -> str:
    source = _SOURCES.get(method or "", method or "an unnamed source")
    of_profile = f", profile {profile}" if profile else ""
    kind = ", temporary" if frozen.token else ""
    return f"{source}{of_profile}{kind}{_whose(case)}"


def _whose(case: Case) -> str:
    """Say where these are not the daemon's own."""
    if case.running is None or case.running.uid is None:
        return ""
    daemons = user_name(case.running.uid)
    return "" if daemons == me() else f"; {me()}'s, while the daemon runs as {daemons} and has its own"
