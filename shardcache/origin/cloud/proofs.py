"""Proofs: credentials in the form that requests carry, renewed before they expire.

A proof consists of headers, such as a bearer token, or of a signed query. `StoreOrigin` gets a
proof from `RenewedProof` for each request. Each store has its own function that creates proofs.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from shardcache.origin.filesystems.fsspec_errors import translate_fsspec_errors
from shardcache.shared.exceptions import ShardcacheError

NO_CREDENTIALS = "none: anonymous"

# Time before a proof's expiry at which the proof is renewed.
_EARLY_S = 300.0
# Time between a renewal that failed and the next, while the previous proof is still valid.
_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Credentials in the form that requests carry. A proof is equal only to itself.

    Attributes:
        headers: headers to send.
        query: query to append to the url, with its "?"; empty for none.
        expires_s: POSIX time of expiry; infinite if the proof does not expire.
        source: where the credentials come from, as shown to users.
    """

    headers: Mapping[str, str]
    query: str = ""
    expires_s: float = math.inf
    source: str = NO_CREDENTIALS


def _expired_proof() -> Proof:
    """Return a proof that stands for none: its expiry is always in the past."""
    return Proof({}, expires_s=-math.inf)


class RenewedProof:
    """A proof that is renewed five minutes before it expires, or halfway through a short life.

    If several requests need a new proof at the same time, one of them renews it for all.

    Args:
        new_proof: returns a new proof. Its argument is True if the store refused the last proof,
            which may have been revoked before its expiry.
    """

    def __init__(self, new_proof: Callable[[bool], Awaitable[Proof]]) -> None:
        self._new_proof = new_proof
        self._renewing = asyncio.Lock()
        self._proof = _expired_proof()
        self._was_refused = False
        self._due_s = -math.inf  # POSIX time of the next renewal
        self._failure: ShardcacheError | None = None  # of the latest renewal; None if it succeeded

    async def get(self, url: str) -> Proof:
        """Return the proof for a request.

        While a renewal is in progress, and after a renewal has failed, the previous proof is
        returned until it expires.

        Args:
            url: the url that is requested; used only in errors.

        Raises the error of a renewal that failed, if the previous proof has expired.
        """
        now_s = time.time()
        if now_s < self._due_s:
            return self._proof
        # A request need not wait for a renewal while the previous proof is still valid.
        is_being_renewed = self._renewing.locked()
        if is_being_renewed and now_s < self._proof.expires_s:
            return self._proof

        earlier_failure = self._failure
        async with self._renewing:
            failure = self._failure
            # If a renewal failed while this request waited for it, its own would fail as well. So
            # it raises the same error, with its own url.
            if failure is not None and failure is not earlier_failure:
                raise type(failure)(failure.message, url=url, remedy=failure.remedy)
            # Another request may have renewed the proof while this request waited for the lock.
            if time.time() >= self._due_s:
                await self._renew(url)
        return self._proof

    def record_refusal(self, proof: Proof) -> bool:
        """Record that the store did not accept a proof.

        Returns whether the store may accept a new proof: only proofs that expire can be renewed.
        """
        may_be_renewed = proof.expires_s < math.inf
        # If the refused proof is not the current one, another request has renewed it already.
        is_current = proof is self._proof
        if may_be_renewed and is_current:
            self._proof = _expired_proof()
            self._due_s = -math.inf
            self._was_refused = True
        return may_be_renewed

    async def _renew(self, url: str) -> None:
        """Renew the proof. Raises the error of a failure only if the previous proof has expired."""
        now_s = time.time()
        try:
            with translate_fsspec_errors(url):
                proof = await self._new_proof(self._was_refused)
        except ShardcacheError as exn:
            self._failure = exn
            if now_s >= self._proof.expires_s:
                raise
            self._due_s = now_s + _PAUSE_S
            return

        life_s = proof.expires_s - now_s
        self._proof = proof
        self._failure = None
        self._was_refused = False
        # A proof with a short life is used for at least half of its life.
        self._due_s = now_s + max(life_s - _EARLY_S, life_s / 2)
