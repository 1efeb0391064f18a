"""Programs that print AWS credentials: `credential_process` in the user's config.

A profile or a role's source profile may name such a program. Here the programs are leashed: a
program is killed when the request that waits for it is cancelled, and when the daemon ends. What a
program prints may hold a secret, so its standard error is dropped, and errors do not quote its
output.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from functools import partial
from typing import Any

from aiobotocore.credentials import (
    AioAssumeRoleProvider,
    AioCredentialResolver,
    AioProcessProvider,
    AioProfileProviderBuilder,
    create_credential_resolver,
)
from aiobotocore.session import AioSession
from botocore.exceptions import CredentialRetrievalError

_PROVIDER = "credential_process"  # the SDK's name of the provider that runs programs

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
_REQUIRED = ("AccessKeyId", "SecretAccessKey")


class LeashedProfiles(AioProfileProviderBuilder):  # type: ignore[misc]
    """The SDK's providers for a profile's credentials, whose programs are leashed."""

    def __init__(self, session: AioSession, region: str | None) -> None:
        super().__init__(session, cache={}, region_name=region)
        self._load_config = lambda: session.full_config

    def providers(self, profile_name: str, disable_env_vars: bool = False) -> list[Any]:
        """Return the providers in the order of the SDK."""
        providers = super().providers(profile_name, disable_env_vars)
        return _with_leashed(providers, self.process_provider(profile_name))

    def process_provider(self, profile_name: str) -> AioProcessProvider:
        """Return the provider that runs a profile's program."""
        return AioProcessProvider(
            profile_name=profile_name,
            load_config=self._load_config,
            popen=start_program,
        )


def resolver_of(session: AioSession, region: str | None) -> AioCredentialResolver:
    """Return the SDK's chain of credential providers; every `credential_process` is leashed."""
    resolver = create_credential_resolver(session, region_name=region)
    profiles = LeashedProfiles(session, region)
    for provider in resolver.providers:
        if isinstance(provider, AioAssumeRoleProvider):
            # This builder creates the providers for a role's source profile. The attribute has no
            # public name.
            provider._profile_provider_builder = profiles  # noqa: SLF001
    profile = session.get_config_variable("profile") or "default"
    leashed = profiles.process_provider(profile)
    resolver.providers = _with_leashed(resolver.providers, leashed)
    return resolver


def _with_leashed(providers: list[Any], leashed: AioProcessProvider) -> list[Any]:
    """Return providers, with the leashed provider in place of each one that runs a program."""
    return [leashed if isinstance(each, AioProcessProvider) else each for each in providers]


async def start_program(*command: str, **_options: Any) -> "CredentialProcess":
    """Start a program; this is the `popen` of `AioProcessProvider`.

    The options that the provider passes are ignored, as others are needed here.

    Raises CredentialRetrievalError if the program cannot be started.
    """
    # The program gets a session, and so a process group, for itself: all that it starts is killed
    # with it.
    die_with_daemon = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_daemon,
        )
    except OSError as exn:
        raise _error(f"it cannot be started: {exn.strerror}") from None
    return CredentialProcess(process)


class CredentialProcess:
    """A running program, with the interface of the process that `AioProcessProvider` expects."""

    # The SDK checks this after `communicate`, which has raised the error for any other status.
    returncode = 0

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def communicate(self) -> tuple[bytes, bytes]:
        """Return the credentials as JSON, and an empty standard error.

        A cancelled call kills the program. Raises CredentialRetrievalError if the program fails, or
        prints anything but credentials.
        """
        try:
            printed, _ = await self._process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            raise
        if self._process.returncode:
            raise _error(f"it ended with status {self._process.returncode}")
        _check_printed(printed)
        return printed, b""


def _check_printed(printed: bytes) -> None:
    """Raise CredentialRetrievalError unless a program printed credentials."""
    try:
        credentials = json.loads(printed)
    except ValueError:
        raise _error("it printed no JSON") from None
    if not isinstance(credentials, dict) or credentials.get("Version") != 1:
        raise _error('it printed no JSON object with "Version": 1')
    missing = [name for name in _REQUIRED if not isinstance(credentials.get(name), str)]
    if missing:
        raise _error(f"it printed no {' and no '.join(missing)}")


def _error(problem: str) -> CredentialRetrievalError:
    """Return the SDK's error for a program that gave no credentials."""
    return CredentialRetrievalError(
        provider=_PROVIDER,
        error_msg=f"{problem}; run the command of your AWS config to see why",
    )
