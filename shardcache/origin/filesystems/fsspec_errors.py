"""Translation of the errors of fsspec filesystems and their packages into shardcache's errors."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardcache.origin.http.http_errors import error_of
from shardcache.shared import exceptions
from shardcache.shared.urls.local_urls import local_path

# Names of packages' exceptions that are not OSErrors, by module. An exception can occur only if its
# module is loaded, so no module is imported to catch one.
_FOREIGN = {
    "aiohttp": "ClientError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
    "azure.core.exceptions": "AzureError",
    "httpx": "HTTPError",
    "httpx2": "HTTPError",
}
# Names of exceptions which mean that access is denied, so that a retry does not help.
_DENIALS = {"ClientAuthenticationError", "DefaultCredentialsError", "RefreshError"}
# Beginning of the message of the OSError that gcsfs raises for status 403.
_FORBIDDEN = "Forbidden: "
# Attributes of an exception, or of its response, that state an HTTP status.
_STATUS_ATTRIBUTES = ("status", "status_code", "code")


@contextmanager
def translate_fsspec_errors(url: str) -> Iterator[None]:
    """Translate the exceptions that a filesystem raises in the block.

    Args:
        url: the url that is read, for the errors.
    """
    try:
        yield
    except exceptions.ShardcacheError:  # this comes first: a NotFoundError is also an OSError
        raise
    except foreign_errors() as exn:
        raise _translation(exn, url) from exn


def foreign_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the classes of exceptions that a filesystem may raise, and the classes in `more`.

    They include Python's OSError and ValueError.
    """
    loaded: list[type[Exception]] = []
    for module, name in _FOREIGN.items():
        if module in sys.modules:
            loaded.append(getattr(sys.modules[module], name))
    return OSError, ValueError, *loaded, *more


def _translation(exn: Exception, url: str) -> exceptions.ShardcacheError:
    """Return shardcache's error for an exception of a filesystem."""
    reason = str(exn) or type(exn).__name__
    if isinstance(exn, (FileNotFoundError, NotADirectoryError)):
        return missing_error("file", url)
    if _is_denial(exn):
        return exceptions.AccessDeniedError(
            f"the daemon may not read it: {reason}",
            url=url,
            remedy="give the daemon's user or credentials access",
        )
    if isinstance(exn, IsADirectoryError):
        return folder_error(url)
    status = _status(exn)
    if status is not None:
        return error_of(status, reason, url)
    return exceptions.OriginUnavailableError(f"the read failed: {reason}", url=url)


def _is_denial(exn: Exception) -> bool:
    """Return whether an exception means that access is denied."""
    if isinstance(exn, PermissionError):
        return True
    if isinstance(exn, OSError) and str(exn).startswith(_FORBIDDEN):
        return True
    names = {cls.__name__ for cls in type(exn).__mro__}
    return not _DENIALS.isdisjoint(names)


def _status(exn: Exception) -> int | None:
    """Return the HTTP status that an exception or its response states; None if there is none."""
    for source in (exn, getattr(exn, "response", None)):
        for name in _STATUS_ATTRIBUTES:
            status = getattr(source, name, None)
            if isinstance(status, int):
                return status
    return None


def missing_error(kind: str, url: str) -> exceptions.NotFoundError:
    """Return the error for a file or folder that does not exist.

    Args:
        kind: "file" or "folder".
    """
    path = local_path(url)
    remedy = None
    if path is not None:
        folder = shlex.quote(str(Path(path).parent))
        remedy = f"check the path (ls {folder}/), on the node of the daemon"
    return exceptions.NotFoundError(f"the {kind} does not exist", url=url, remedy=remedy)


def folder_error(url: str) -> exceptions.NotFoundError:
    """Return the error for a url that names a folder, not a file."""
    return exceptions.NotFoundError(
        "this is a folder",
        url=url,
        remedy="end the url with / to take every shard below it",
    )


def special_file_error(url: str) -> exceptions.NotFoundError:
    """Return the error for a url that names neither a file nor a folder."""
    return exceptions.NotFoundError(
        "this is a pipe, socket or device, not a regular file",
        url=url,
        remedy="write its content to a file",
    )
