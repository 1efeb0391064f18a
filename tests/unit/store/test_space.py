"""The accounting holds its bounds in whatever order things happen."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from shardcache.store.store import Reservation, Space

CAPACITY_BYTES = 100
DISK_BYTES = 120
MIN_FREE_BYTES = 10


class Accounting(RuleBasedStateMachine):
    """Reservations open, grow, are written and close, over a disk whose free space follows what is written."""

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(CAPACITY_BYTES, MIN_FREE_BYTES)
        self.on_disk_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Free space of the disk."""
        return DISK_BYTES - self.on_disk_bytes

    @rule(target=reservations)
    def open(self) -> Reservation:
        """A transfer begins."""
        return self.space.reserve()

    @rule(reservation=reservations, size_bytes=st.integers(0, 60))
    def grow(self, reservation: Reservation, size_bytes: int) -> None:
        """A transfer asks for space, and takes it where there is some."""
        self.space.measure(self.free_bytes)
        if self.space.shortfall_bytes(size_bytes) == 0:
            reservation.grow(size_bytes)

    @rule(reservation=reservations)
    def write(self, reservation: Reservation) -> None:
        """Its file is preallocated."""
        self.on_disk_bytes += reservation.unwritten_bytes
        reservation.written(reservation.unwritten_bytes)

    @rule(reservation=consumes(reservations), keep=st.booleans())
    def close(self, reservation: Reservation, keep: bool) -> None:
        """It ends: published, or swept."""
        written_bytes = reservation.size_bytes - reservation.unwritten_bytes
        kept_bytes = written_bytes if keep else 0
        self.on_disk_bytes -= written_bytes - kept_bytes
        reservation.close(kept_bytes)
        reservation.close()  # the second close changes nothing

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Published bytes go."""
        size_bytes = data.draw(st.integers(0, self.space.kept_bytes))
        self.space.kept_bytes -= size_bytes
        self.on_disk_bytes -= size_bytes

    @invariant()
    def bounds_hold(self) -> None:
        """Neither the capacity nor the free-space floor is ever passed."""
        assert 0 <= self.space.used_bytes <= CAPACITY_BYTES
        assert self.free_bytes >= MIN_FREE_BYTES
        assert self.on_disk_bytes == self.space.used_bytes - self.space.unwritten_bytes


def test_bounds_hold_in_any_order() -> None:
    """No sequence of transfers, writes, ends and evictions passes capacity or floor."""
    run_state_machine_as_test(Accounting)
