"""Redaction of texts that are shown."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.shared.exceptions import from_json
from shardcache.shared.wording.redact import excerpt, printable, redact
from support.cases import first_quick

SECRETS = [
    (
        "https://h/a.tar?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={}"
        "&X-Amz-Date=1&X-Amz-Signature={}"
    ),
    "https://h/a.tar?x-amz-security-token={}#part",
    "https://h/a.tar?AWSAccessKeyId=1&Expires=2&Signature={}",
    "https://h/a.tar?GoogleAccessId={}&X-Goog-Signature={}",
    "https://account.blob.core.windows.net/c/a.tar?sv=2024&sr=c&sig={}&se=2026",
    "https://h/a.tar?Policy={}&Signature={}&Key-Pair-Id=1",
    (
        "https://h/a.tar?TOKEN={}&access_token={}&hf-token={};api_key={}&apikey={}"
        "&client_secret={}&auth={}"
    ),
    "https://user:{}@host/a.tar",
    "ftp://u:{}@host:21/a.tar?password={}",
    "s3://AKIA:{}@bucket/a.tar",
    "cannot reach 'https://h/a.tar?sig={}' (https://u:{}@h/b): refused",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_of_urls_are_left_out(text: str) -> None:
    """Of every kind of signed url, in an url alone and within a sentence; the rest of it stays."""
    shown = redact(text.replace("{}", "MARK/+%2B="))
    assert "MARK" not in shown
    assert "REDACTED" in shown
    assert shown.startswith(text[:5])
    assert shown.endswith(text.rpartition("{}")[2])


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a=1&b=2.tar",
        "https://h/a?versionId=x&part=2",
        "s3://b/signature/token=x.tar",
        "az://c@d/e?x#sig",
        "http://h:80/a@b",
        "http://[::1]:80/a@b",
        "s3://arn:aws:s3:u:1:accesspoint/x/a@b",
    ],
)
def test_other_urls_stay_as_they_are(url: str) -> None:
    """A url is a name: what is no secret is not to be touched."""
    assert redact(url) == url


@given(st.text("?&=:/@ab;#.", max_size=30), st.sampled_from(["sig", "X-Amz-Signature", "token"]))
def test_signature_is_removed_whatever_surrounds_it(text: str, name: str) -> None:
    """However urls are cut and quoted; what is left out once needs nothing left out again."""
    shown = redact(f"https://h/{text}?{name}=MARK&{text}")
    assert "MARK" not in shown
    assert redact(shown) == shown


@given(st.text())
def test_printable_text_is_one_line_without_commands(text: str) -> None:
    """Nothing that a terminal obeys gets through, and what needs no care is as it was."""
    shown = printable(text)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    assert len(shown.splitlines()) <= 1
    if text.isprintable():
        assert shown == text


def test_errors_hold_no_secrets() -> None:
    """Neither in what they say nor on the wire, whoever raised them with whatever url."""
    url = "https://u:MARK@h/a.tar?X-Amz-Signature=MARK"
    error = AccessDeniedError(f"refused: {url}", url=url)
    again = from_json(error.to_json())
    assert "MARK" not in f"{error} {error!r} {error.args} {error.to_json()} {again} {again!r}"
    assert error.url == "https://REDACTED@h/a.tar?X-Amz-Signature=REDACTED"


_LOGGING = """
import logging, sys, structlog
from shardcache.telemetry import logs
logs.configure("debug", sys.argv[1])
def fail(password):
    session = {"token": password}
    raise OSError("https://h/a?sig=MARK")
try:
    fail("MA" + "RK")
except OSError:
    structlog.get_logger().exception("broken", url="https://u:MARK@h/", reason="a\\nb\\x1b[2J")
    logging.getLogger("lib").exception("GET %s", "https://h/a?X-Amz-Signature=MARK")
"""


@pytest.mark.parametrize("part", ["://x:y", "?a_", "&token=", "@"])
def test_redaction_takes_linear_time(part: str) -> None:
    """The event loop redacts urls; the test run's limit would notice a slow one."""
    assert "MARK" not in redact("@" + part * 200_000 + " https://u:MARK@h/?sig=MARK")
    assert len(ConfigError(part * 200_000).message) < 10_000


@pytest.mark.parametrize("form", first_quick(["text", "json"]))
def test_log_lines_and_tracebacks_hold_no_secrets(form: str) -> None:
    """No parts of urls or values of variables show, and a reason begins no line."""
    done = subprocess.run(
        [sys.executable, "-c", _LOGGING, form], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("REDACTED") >= 4
    assert "fail" in done.stderr
    assert "MARK" not in done.stderr
    assert "\x1b[2J" not in done.stderr
    assert "\nb" not in done.stderr
    if form == "json":
        ours, librarys = map(json.loads, done.stderr.splitlines())
        assert ours["event"] == "broken"
        assert librarys["logger"] == "lib"
        assert librarys["level"] == "error"


def test_excerpt_is_printable_redacted_and_short() -> None:
    """Its end with the number of tries stays, and no secret is cut beyond recognition."""
    found = excerpt(
        "\x1b[2J\u202e\udc80 https://h/a?sig=" + "s" * 480 + " \u2028 " + "x" * 10**6 + " (end)"
    )
    assert found.isprintable()
    assert len(found) == 500
    assert found.startswith(r"\x1b[2J\u202e\udc80 https://h/a?sig=REDACTED \u2028 x")
    assert "…" in found
    assert excerpt("a" * 600 + " (end)").endswith(" (end)")
    assert excerpt("a" * 500) == "a" * 500
