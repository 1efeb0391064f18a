"""The program that computes the costs in docs/cluster.md, with the deal and the ring that the programs use."""

import pytest

from benchmarks.downloads import egress


def test_a_bill_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node fetches the whole dataset once, or all of them together do; what is kept is not fetched again."""
    monkeypatch.setattr(egress, "SHARDS", 1024)
    shuffled, kept, tier, whole = egress.bills(4)
    assert (whole.first, whole.later) == (4.0, 0.0)
    assert (tier.first, tier.later) == (1.0, 0.0)
    assert kept.later < 0.05 < 0.5 < shuffled.later <= 1.05
    assert tier.egress_bytes < shuffled.egress_bytes and tier.lan_bytes < egress.SHARDS * egress.SHARD_BYTES / 4
