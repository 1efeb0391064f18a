"""Credentials that are kept of those that sessions hand over."""

import os
from collections.abc import Iterable
from contextlib import ExitStack

import pytest

from shardcache.errors import ProtocolError
from shardcache.origin.session_credentials import SessionCredentials
from shardcache.shared.credentials.aws_keys import AwsKeys

UID = os.geteuid()


def keys(number: int) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": str(number), "AWS_SECRET_ACCESS_KEY": "secret"}


def kept(handed: SessionCredentials) -> list[int]:
    """Return the numbers of the keys that are used, newest first."""
    return [int(each.access_key) for each in handed.newest_first(AwsKeys)]


def hold(handed: SessionCredentials, stack: ExitStack, numbers: Iterable[int]) -> None:
    for number in numbers:
        stack.enter_context(handed.held(keys(number), UID))


def test_keys_are_kept_as_long_as_any_of_their_sessions() -> None:
    """However many these are; and of the others, the sixteen that ended last."""
    handed = SessionCredentials({}, is_private=True)
    with ExitStack() as lasting:
        hold(handed, lasting, range(20))
        with ExitStack() as ending:  # the newest first
            hold(handed, ending, range(40))
            assert kept(handed) == list(reversed(range(40)))
        assert kept(handed) == list(reversed(range(36)))
    assert kept(handed) == list(reversed(range(16)))


def test_keys_that_are_handed_over_again_are_no_newer() -> None:
    """A session that began long ago reconnects; its keys count as those of a session again."""
    handed = SessionCredentials({}, is_private=True)
    for number in (0, 1):
        with handed.held(keys(number), UID):
            pass
    with handed.held(keys(0), UID):
        for number in range(2, 20):
            with handed.held(keys(number), UID):
                pass
        assert kept(handed) == [*reversed(range(4, 20)), 0]


def test_own_keys_are_not_among_them() -> None:
    """Nor are a session's that hands over nothing."""
    handed = SessionCredentials(keys(1), is_private=True)
    with handed.held(keys(1), UID), handed.held({}, UID):
        assert kept(handed) == []


@pytest.mark.parametrize(
    ("is_private", "uid"), [(False, UID), (True, UID + 1)], ids=["the node's", "another user's"]
)
def test_only_the_users_own_private_daemon_takes_credentials(is_private: bool, uid: int) -> None:
    """Whoever hands over none is served."""
    handed = SessionCredentials({}, is_private=is_private)
    with pytest.raises(ProtocolError), handed.held(keys(1), uid):
        pass
    with handed.held({}, uid):
        assert kept(handed) == []
