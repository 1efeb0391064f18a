"""The S3 endpoint answers the users of this node by their keys, and nobody else."""

import json
import select
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardcache.errors import ConfigError
from shardcache.server.listening.s3_listener import listening_for_s3
from support.cases import first_quick
from support.network.other_user import OtherUser, needs_root, open_folder
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.s3_door import (
    DOOR,
    address_of,
    ask,
    connect,
    connection,
    keys_of,
    refusal,
    request_of,
    signed,
)
from support.stores.buckets import Bucket, MotoS3, new_bucket

STRANGER = OtherUser(54321)
MEMBER = OtherUser(54322, groups=(54399,))


@pytest.fixture(scope="module")
def bucket(moto_server: MotoS3) -> Bucket:
    """A bucket with two folders."""
    found = new_bucket(moto_server)
    found.put("open/a", b"open")
    found.put("team/a", b"team")
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[Daemon]:
    """A daemon with an endpoint."""
    with Daemon(tmp_path_factory.mktemp("d"), *DOOR, env=bucket.env()) as running:
        yield running


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with open_folder() as found:
        yield found


@pytest.fixture
def path(bucket: Bucket) -> str:
    """The path of an object that may be read."""
    return f"/{bucket.name}/open/a"


def test_an_unsigned_request_is_refused(daemon: Daemon, path: str) -> None:
    """Whatever it is for."""
    for target in (path, "/", path.rpartition("/")[0]):
        answer = ask(daemon, target, {"Host": address_of(daemon)})
        assert answer.status == 403
        assert answer.code == "AccessDenied"


def test_a_key_that_was_never_given_is_refused(daemon: Daemon, path: str) -> None:
    """Such as one of the object store itself."""
    keys = {"AccessKeyId": "AKIAIOSFODNN7EXAMPLE", "SecretAccessKey": "secret"}
    answer = ask(daemon, *signed(daemon, path, keys))
    assert answer.status == 403
    assert answer.code == "InvalidAccessKeyId"


def test_a_wrong_secret_is_refused(daemon: Daemon, path: str) -> None:
    """The id of a key is no secret: logs show it."""
    keys = {**keys_of(daemon), "SecretAccessKey": "guessed"}
    answer = ask(daemon, *signed(daemon, path, keys))
    assert answer.status == 403
    assert answer.code == "SignatureDoesNotMatch"


def test_a_signature_is_for_one_request(daemon: Daemon, path: str) -> None:
    """It opens no other path, method or query."""
    target, headers = signed(daemon, path, keys_of(daemon))
    assert ask(daemon, target, headers).body == b"open"
    for method, other in (
        ("HEAD", target),
        ("GET", f"{target}b"),
        ("GET", f"{target}?partNumber=1"),
    ):
        assert ask(daemon, other, headers, method).status == 403


def test_a_presigned_url_is_for_one_object_and_time(daemon: Daemon, path: str) -> None:
    """Its signature is in the query, where it lasts as long as it says."""
    target, headers = signed(daemon, path, keys_of(daemon), presigned_s=60)
    assert ask(daemon, target, headers).body == b"open"
    assert ask(daemon, target.replace("=60&", "=61&"), headers).code == "SignatureDoesNotMatch"
    assert ask(daemon, target.replace("open/a", "team/a"), headers).code == "SignatureDoesNotMatch"


def test_a_session_token_that_was_not_given_is_refused(daemon: Daemon, bucket: Bucket) -> None:
    """One is left in the environment by other credentials."""
    client = connect(daemon, {**keys_of(daemon), "SessionToken": "of something else"})
    assert refusal(client.list_objects_v2, Bucket=bucket.name) == (400, "InvalidToken")


def test_an_expired_key_is_refused(tmp_path: Path, bucket: Bucket, path: str) -> None:
    """The answer says that it has expired."""
    with Daemon(tmp_path, *DOOR, "--s3-key-life-s", "0.5", env=bucket.env()) as daemon:
        keys = keys_of(daemon)

        def code() -> str:
            return ask(daemon, *signed(daemon, path, keys)).code

        eventually(lambda: code() == "ExpiredToken")


@pytest.mark.slow
def test_a_key_is_given_again_until_half_of_its_life_is_over(
    tmp_path: Path, bucket: Bucket
) -> None:
    """Thousands of processes ask for one."""
    with Daemon(tmp_path, *DOOR, "--s3-key-life-s", "1000", env=bucket.env()) as daemon:
        assert keys_of(daemon) == keys_of(daemon)
    with Daemon(tmp_path, *DOOR, "--s3-key-life-s", "0.5", env=bucket.env()) as daemon:
        first = keys_of(daemon)
        eventually(lambda: keys_of(daemon)["AccessKeyId"] != first["AccessKeyId"])


@pytest.mark.slow
def test_keys_outlive_the_daemon(daemon: Daemon, path: str) -> None:
    """Their file is the daemon's alone."""
    keys = keys_of(daemon)
    assert (daemon.cache_dir / "s3-keys").stat().st_mode & 0o777 == 0o600
    daemon.restart()
    assert ask(daemon, *signed(daemon, path, keys)).body == b"open"


def test_keys_that_others_could_read_are_worth_nothing(daemon: Daemon, path: str) -> None:
    """Nor those that others could have written."""
    keys = keys_of(daemon)
    daemon.kill()
    (daemon.cache_dir / "s3-keys").chmod(0o644)
    daemon.start()
    assert ask(daemon, *signed(daemon, path, keys)).code == "InvalidAccessKeyId"


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", first_quick([b"\xff\xfe", b"[1,2,3]\n", b'["a","b",0,[],"x"]\n', b"{}\n" * 3, b"["])
)
def test_a_damaged_file_of_keys_gives_none(daemon: Daemon, path: str, content: bytes) -> None:
    """The daemon starts, and new keys are valid."""
    daemon.kill()
    file = daemon.cache_dir / "s3-keys"
    file.write_bytes(content)
    file.chmod(0o600)
    daemon.start()
    assert ask(daemon, *signed(daemon, path, keys_of(daemon))).body == b"open"


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::2]", ""]
)
def test_a_site_that_rebinds_its_name_reads_nothing(daemon: Daemon, path: str, host: str) -> None:
    """Not even with a signature, which would be for its own name."""
    target, headers = signed(daemon, path, keys_of(daemon), host=host or "x")
    answer = ask(daemon, target, {**headers, "Host": host})
    assert answer.status == 403
    assert answer.code == "AccessDenied"


@pytest.mark.parametrize(
    "header",
    [{"Origin": "http://127.0.0.1"}, {"Sec-Fetch-Mode": "cors"}, {"sec-fetch-site": "none"}],
)
def test_web_pages_are_refused(daemon: Daemon, path: str, header: dict[str, str]) -> None:
    """A browser says where a request comes from; there is no CORS."""
    target, headers = signed(daemon, path, keys_of(daemon))
    answer = ask(daemon, target, headers | header)
    assert answer.status == 403
    assert answer.code == "AccessDenied"
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
    assert ask(daemon, target, {**headers, "Origin": "x"}, "OPTIONS").status == 403


@pytest.mark.slow
@needs_root
def test_rules_are_those_of_the_user(bucket: Bucket, open_root: Path) -> None:
    """A user's key opens what the socket would give this user, by number and group, no more."""
    config = open_root / "shardcache.toml"
    config.write_text(
        f'[[allow]]\nprefix = "{bucket.url}/open/"\n\n'
        f'[[allow]]\nprefix = "{bucket.url}/team/"\ngroups = [54399]\n'
    )
    with Daemon(open_root, *DOOR, "--config", str(config), env=bucket.env()) as daemon:
        daemon.socket.chmod(0o666)
        codes = {}
        for user in (STRANGER, MEMBER):
            status, (keys,) = user.ask(daemon.socket, "POST", "/v1/credentials")
            assert status == 200
            read = [
                ask(daemon, *signed(daemon, f"/{bucket.name}/{key}/a", keys)).status
                for key in ("open", "team")
            ]
            listed = ask(
                daemon, *signed(daemon, f"/{bucket.name}?list-type=2&prefix=team%2F", keys)
            ).status
            whole = ask(daemon, *signed(daemon, f"/{bucket.name}?list-type=2", keys)).status
            buckets = ask(daemon, *signed(daemon, "/", keys)).body.count(bucket.name.encode())
            heads = [
                signed(daemon, path, keys, method="HEAD")
                for path in (f"/{bucket.name}", "/another-bucket")
            ]
            known = [ask(daemon, *head, "HEAD").status for head in heads]
            codes[user.uid] = (*read, listed, whole, buckets, *known)
    assert codes == {
        STRANGER.uid: (200, 403, 403, 403, 1, 200, 403),
        MEMBER.uid: (200, 200, 200, 403, 1, 200, 403),
    }


@pytest.mark.parametrize(
    "path_",
    [
        "/{}/../other/a",
        "/{}/%2e%2e/other/a",
        "/{}/a/..%2fb",
        "//{}/a",
        "/{}%00/a",
        "/{}/%ff",
        "/{}/a%0d%0aX:%20y",
    ],
)
def test_odd_paths_lead_nowhere(daemon: Daemon, bucket: Bucket, path_: str) -> None:
    """They are refused with S3's error document, and the daemon goes on."""
    target = path_.format(bucket.name)
    answer = ask(daemon, *signed(daemon, target, keys_of(daemon)))
    assert answer.status in (400, 403, 404)
    assert daemon.status()["s3"]


@pytest.mark.parametrize("key", ["%", "100%", "a%f", "%zz/a", "a%ff"])
def test_a_path_that_is_not_encoded_is_refused(daemon: Daemon, bucket: Bucket, key: str) -> None:
    """It names no object, though its signature is right."""
    answer = ask(daemon, *signed(daemon, f"/{bucket.name}/{key}", keys_of(daemon)))
    assert answer.status == 400
    assert answer.code == "InvalidURI"


@pytest.mark.slow
def test_a_client_that_reads_no_answers_is_cut_off(tmp_path: Path, bucket: Bucket) -> None:
    """Short answers wait for their client no longer than a large object does."""
    bucket.put("open/short", bytes(60_000))
    path = f"/{bucket.name}/open/short"
    with Daemon(tmp_path, *DOOR, "--s3-stall-s", "0.5", env=bucket.env()) as daemon:
        target, headers = signed(daemon, path, keys_of(daemon))
        request = request_of(target, headers)
        with connection(daemon) as client:
            client.setblocking(False)
            with suppress(BlockingIOError):
                while True:  # until more answers are due than the buffers of both sockets hold
                    client.send(request)
            ended = select.poll()
            ended.register(client, 0)  # the end of a connection is always reported
            assert ended.poll(GUARD_S * 1000)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":9099", "192.0.2.1:9099"])
def test_the_endpoint_is_for_the_loopback_alone(address: str) -> None:
    """An address that other machines can reach is refused, with the reason."""
    with pytest.raises(ConfigError, match="other machines"), listening_for_s3(address):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:port", "9099", "nowhere.invalid:1"])
def test_invalid_address_is_refused(address: str) -> None:
    """With the form that it has to have."""
    with pytest.raises(ConfigError, match="--s3"), listening_for_s3(address):
        pass


def test_without_an_endpoint_there_are_no_keys(tmp_path: Path) -> None:
    """The answer says how to have one."""
    with Daemon(tmp_path) as daemon:
        status, answer = daemon.answer("POST", "/v1/credentials")
        assert status == 400
        assert "--s3" in json.loads(answer)["error"]["remedy"]


def test_secrets_are_in_no_log(daemon: Daemon, path: str) -> None:
    """Nor in the status; an answer names no more than the request did."""
    keys = keys_of(daemon)
    ask(daemon, *signed(daemon, path, keys))
    ask(daemon, *signed(daemon, path, {**keys, "SecretAccessKey": "guessed"}))
    assert keys["SecretAccessKey"] not in daemon.log.read_text()
    assert keys["SecretAccessKey"] not in json.dumps(daemon.status())
