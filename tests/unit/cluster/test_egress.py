"""The table of docs/cluster.md is what its program prints."""

from pathlib import Path

from benchmarks.downloads import egress

DOCS = Path(__file__).parents[3] / "docs"


def test_the_documented_bill_is_that_of_the_deal_and_the_ring() -> None:
    """For the smallest cluster; the larger ones take a minute."""
    head, rule, *rows = egress.table([8]).splitlines()
    lines = (DOCS / "cluster.md").read_text().splitlines()
    assert head in lines
    start = lines.index(head)
    assert lines[start : start + 2 + len(rows)] == [head, rule, *rows]


def test_a_bill_adds_up() -> None:
    """Each node fetches the whole dataset once, or all of them together do; what is kept is not fetched again."""
    shuffled, kept, tier, whole = egress.bills(4)
    assert (whole.first, whole.later) == (4.0, 0.0)
    assert (tier.first, tier.later) == (1.0, 0.0)
    assert kept.later < 0.01 < 0.5 < shuffled.later <= 1.01
    assert tier.egress_bytes < shuffled.egress_bytes and tier.lan_bytes < egress.SHARDS * egress.SHARD_BYTES / 4
