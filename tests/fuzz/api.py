"""The admin API held against its description, by schemathesis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import DeserializationContext, GenerationMode, Response
from schemathesis.schemas import APIOperation

from fuzz.api_schema import document
from support.network import unix_http
from support.programs.daemon import Daemon

Operation = APIOperation[Any, Any, Any, Any]

# What the description means by a `shard-pattern`, of which JSON Schema can say only that it is a string.
_NAMES = st.text("abz09-_.", min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))
_TAILS = st.sampled_from(["/", ".tar", ".json", "/*.tar", "/{0..3}.tar", "/{a,b}.tar.gz", "/**", "/[ab].tar"])
patterns = st.builds("file:///{}/{}{}".format, _NAMES, _NAMES, _TAILS)

_SETTINGS = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink]
)

schemathesis.openapi.format("shard-pattern", patterns)


@schemathesis.deserializer("application/x-ndjson")
def _lines(_ctx: DeserializationContext, response: Response) -> list[Any]:
    return [json.loads(line) for line in response.content.splitlines()]


def operations() -> list[Operation]:
    """Return the operations of the admin API."""
    return [_sound(found) for found in schemathesis.openapi.from_dict(document()).get_all_operations()]


def _sound(found: Any) -> Operation:
    operation: Operation = found.ok()  # raises where the description itself is none
    return operation


def examine(daemon: Daemon, operation: Operation, examples: int) -> Iterator[int]:
    """Call one operation with data that fit its description, then with data that do not; yield each answer's status.

    Raises what schemathesis finds: a status, media type or body that the description does not have, an internal error,
    sound data refused, unsound data taken.
    """
    with unix_http.session(daemon.socket) as session:
        for mode in GenerationMode:
            yield from _examine(operation, mode, examples, session)


def _examine(operation: Operation, mode: GenerationMode, examples: int, session: requests.Session) -> list[int]:
    seen: list[int] = []

    @settings(_SETTINGS, max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case[Any]) -> None:
        response = case.call(base_url=unix_http.BASE_URL, session=session)
        seen.append(response.status_code)
        case.validate_response(response)

    try:
        call()
    except Unsatisfiable:
        assert not operation.body and mode is GenerationMode.NEGATIVE, "nothing but a body can be unsound"
    return seen
