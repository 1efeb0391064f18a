"""Source of the credentials used for an S3 store; never the credentials themselves."""

from __future__ import annotations

from typing import Any

from botocore.credentials import Credentials

from shardcache.cache.operations.origin_probe.findings import Finding, failed, of_error, ok
from shardcache.config import OriginTable
from shardcache.errors import ShardcacheError
from shardcache.origin.s3_sdk import SdkSessions
from shardcache.redact import redact

_CHAIN = (
    "nothing found in the whole chain: storage_options, AWS_ACCESS_KEY_ID, web identity, SSO, ~/.aws/credentials and "
    "config, the container's role, the instance's role"
)
_REMEDY = (
    "export AWS_PROFILE=NAME   # before serve; or `profile` (for public data `anon = true`) in an [[origin]] table"
)

# botocore's names for the providers in its chain.
_SOURCES = {
    "env": "AWS_ACCESS_KEY_ID in the environment",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS config file",
    "assume-role": "an assumed role",
    "assume-role-with-web-identity": "a role by web identity",
    "sso": "a single sign-on",
    "login": "a login",
    "custom-process": "an external process (credential_process)",
    "container-role": "the container's role",
    "iam-role": "the instance's role",
}


async def credentials(sessions: SdkSessions, table: OriginTable, url: str, owner: str) -> Finding:
    """Walk the credential chain as a fetch does, renewing where possible; `owner` names the credentials' owner."""
    if table.anon or table.storage_options.get("anon"):
        return ok("none: the [[origin]] table sets anon")
    if table.storage_options.get("key"):
        return ok("storage_options of the [[origin]] table")
    try:
        async with sessions.use(url) as fs:
            found: Credentials | None = await fs.session.get_credentials()
            if found is None:
                return failed(f"none ({owner})", _CHAIN, _REMEDY)
            frozen = await found.get_frozen_credentials()
            profile = fs.session.get_config_variable("profile")
    except ShardcacheError as exn:
        return of_error(exn, f"the credential chain stops there ({owner})")
    except RuntimeError as exn:  # from botocore: credentials still expired after renewal
        return failed(redact(str(exn)), "their issuer returned expired credentials", _REMEDY)
    return ok(f"{_source(found.method, profile, frozen)} ({owner})")


def _source(method: str | None, profile: str | None, frozen: Any) -> str:
    source = _SOURCES.get(method or "", method or "an unnamed source")
    of_profile = f", profile {profile}" if profile else ""
    return f"{source}{of_profile}{', temporary' if frozen.token else ''}"
