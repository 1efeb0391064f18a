"""Secrets in the environment: none names a private daemon; what says where data is does."""

import json
import resource
from pathlib import Path

import pytest

from shardcache.errors import DaemonError
from shardcache.shared.credentials.handed_credentials import handed_labels, handed_over
from shardcache.shared.private import environment_digest

_AWS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token"}
_STRING = "AccountName=account;AccountKey=one;BlobEndpoint=https://host/"


def use(variables: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        (_AWS, "AWS_SECRET_ACCESS_KEY", "another"),
        (_AWS, "AWS_ACCESS_KEY_ID", "another"),
        (_AWS, "AWS_SESSION_TOKEN", "another"),
        (
            {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"},
            "AWS_SECRET_ACCESS_KEY",
            "another",
        ),
        ({"HF_TOKEN": "one"}, "HF_TOKEN", "another"),
        ({"HUGGING_FACE_HUB_TOKEN": "one"}, "HUGGING_FACE_HUB_TOKEN", "another"),
        ({"AZURE_STORAGE_SAS_TOKEN": "one"}, "AZURE_STORAGE_SAS_TOKEN", "another"),
        ({"AZURE_STORAGE_ACCOUNT_KEY": "one"}, "AZURE_STORAGE_ACCOUNT_KEY", "another"),
        ({"AZURE_STORAGE_CLIENT_SECRET": "one"}, "AZURE_STORAGE_CLIENT_SECRET", "another"),
        ({"AZURE_CLIENT_SECRET": "one"}, "AZURE_CLIENT_SECRET", "another"),
        (
            {"AZURE_STORAGE_CONNECTION_STRING": _STRING},
            "AZURE_STORAGE_CONNECTION_STRING",
            _STRING.replace("one", "another"),
        ),
    ],
)
def test_renewed_secret_names_the_same_daemon(
    variables: dict[str, str],
    name: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is handed over, all of it, and every variable with which it is used."""
    use(variables, monkeypatch)
    before = environment_digest(tmp_path)
    assert set(handed_over(variables).values()) == set(variables.values())
    monkeypatch.setenv(name, value)
    assert environment_digest(tmp_path) == before
    assert value in handed_over({**variables, name: value}).values()


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        (_AWS, "AWS_ENDPOINT_URL", "https://other"),
        (_AWS, "AWS_PROFILE", "other"),
        ({"AZURE_STORAGE_SAS_TOKEN": "one"}, "AZURE_STORAGE_ACCOUNT_NAME", "other"),
        ({"AZURE_CLIENT_SECRET": "one"}, "AZURE_CLIENT_ID", "other"),
        (
            {"AZURE_STORAGE_CONNECTION_STRING": _STRING},
            "AZURE_STORAGE_CONNECTION_STRING",
            _STRING.replace("host", "other"),
        ),
        ({"HF_TOKEN": "one"}, "HF_ENDPOINT", "https://other"),
    ],
)
def test_another_place_names_another_daemon(
    variables: dict[str, str],
    name: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One url would be two objects in one cache."""
    use(variables, monkeypatch)
    before = environment_digest(tmp_path)
    monkeypatch.setenv(name, value)
    assert environment_digest(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["AZURE_OPENAI_API_KEY", "GOOGLE_API_KEY", "AWS_BEARER_TOKEN_BEDROCK"]
)
def test_keys_of_other_services_name_no_daemon(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store is read with them."""
    before = environment_digest(tmp_path)
    monkeypatch.setenv(name, "key")
    assert environment_digest(tmp_path) == before


def test_key_file_is_handed_over_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is; it may be visible to its process alone. Formatting makes no other key."""
    key = {"type": "service_account", "private_key": "secret"}
    digests = []
    for name, text in (("a.json", json.dumps(key)), ("b.json", json.dumps(key, indent=2))):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / name))
        handed = handed_over({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / name)})
        assert json.loads(handed["GOOGLE_APPLICATION_CREDENTIALS"]) == key
        assert handed_over(handed) == handed, "a message is read as an environment is"
        digests.append(environment_digest(tmp_path))
    assert len(set(digests)) == 1


@pytest.mark.parametrize("text", ['{"type": "external_account"}', "no JSON", "[]", None])
def test_file_without_a_key_counts_by_its_path(text: str | None, tmp_path: Path) -> None:
    """It says where a secret comes from, or cannot be read."""
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "a.json")}
    assert handed_over(environment) == {}
    assert handed_labels(environment) == {}


@pytest.mark.parametrize(
    "bad", ["line break\n", "two\r\nlines", "t\u00f6ken", "\udcff", "nul\0", "t" * 8193]
)
@pytest.mark.parametrize("name", [*_AWS, "AZURE_STORAGE_SAS_TOKEN"])
def test_secret_that_no_request_can_have_is_not_handed_over(name: str, bad: str) -> None:
    """Requests with it would fail for the jobs of other secrets, too."""
    assert handed_over({**_AWS, name: "good"})
    environment = {name: bad} if name not in _AWS else {**_AWS, name: bad}
    assert handed_over(environment) == {}
    assert handed_labels(environment) == {}, "it names a daemon of its own"


@pytest.mark.parametrize("bad", ["t\u00f6ken", "\udcff", "nul\0", "t" * 8193])
def test_token_of_the_hub_that_no_request_can_have_is_not_handed_over(bad: str) -> None:
    """Line breaks are not among these: the Hub's package removes them."""
    assert handed_over({"HF_TOKEN": bad}) == {}
    assert handed_over({"HF_TOKEN": "one\n"}) == {"HF_TOKEN": "one"}


def test_secrets_are_not_shown() -> None:
    """Neither the daemon's name nor a `repr` has one."""
    environment = {
        **_AWS,
        "HF_TOKEN": "secret",
        "AZURE_STORAGE_CONNECTION_STRING": _STRING.replace("one", "secret"),
    }
    assert "secret" not in repr(handed_labels(environment)).replace("secret of Azure", "")


def test_key_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    """Each start of a job on a full disk would leave one more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(DaemonError):
            environment_digest(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left_bytes", [0, 31])
def test_key_that_was_cut_short_is_replaced(left_bytes: int, tmp_path: Path) -> None:
    """With an empty one, anyone could try out which secrets give a daemon's name."""
    environment_digest(tmp_path)
    key = tmp_path / "key"
    whole = key.read_bytes()
    key.write_bytes(whole[:left_bytes])
    digest = environment_digest(tmp_path)
    assert len(key.read_bytes()) == len(whole)
    assert environment_digest(tmp_path) == digest, "it stays"
