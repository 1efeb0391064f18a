"""Keys for the S3 endpoint: those that are remembered."""

import time
from pathlib import Path

from shardcache.access.rules import Peer
from shardcache.server.s3.user_keys import S3Key, S3Keys

MAX_KEYS = 10_000
DAY_S = 24 * 3600


def test_keys_beyond_the_maximum_are_forgotten(tmp_path: Path) -> None:
    """The newest ones stay; keys that expired long ago do not count."""
    now_s = time.time()
    old = [
        S3Key(f"old-{number}", "secret", Peer(number), now_s - 30 * DAY_S) for number in range(5)
    ]
    valid = [
        S3Key(f"key-{number}", "secret", Peer(number), now_s + DAY_S)
        for number in range(MAX_KEYS + 3)
    ]
    file = tmp_path / "keys"
    file.write_text("".join(key.to_line() for key in [*old, *valid]))
    file.chmod(0o600)
    keys = S3Keys(file, tmp_path / "new", life_s=DAY_S)
    keys.restore()
    assert [key for key in [*old, *valid] if keys.get(key.access_key)] == valid[3:]
