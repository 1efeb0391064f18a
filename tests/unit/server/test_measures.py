"""Counts of histograms."""

from hypothesis import given
from hypothesis import strategies as st

from shardcache.metrics import OTHERS, Counters, Histogram, Histograms

BOUNDS = (0.1, 1.0, 10.0)


@given(values=st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0, 1.5, 10.0, 10.5, 99.0])))
def test_each_bucket_has_what_does_not_exceed_its_bound(values: list[float]) -> None:
    """A value on a bound belongs below it, as Prometheus' `le` says; the last bucket has everything."""
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    below = [sum(value <= bound for value in values) for bound in BOUNDS]
    assert histogram.cumulative() == [*below, len(values)]
    assert histogram.total == sum(values)


def test_ever_more_labels_share_one_histogram() -> None:
    """Whoever reads from ever more stores cannot make the page grow for ever."""
    histograms = Histograms(BOUNDS)
    for number in range(1000):
        histograms.of(f"https://host-{number}").observe(1.0)
    by_label = dict(histograms.by_label())
    assert len(by_label) == 65
    assert by_label["https://host-0",].cumulative()[-1] == 1
    assert sum(histogram.cumulative()[-1] for histogram in by_label.values()) == 1000
    assert by_label[OTHERS,].cumulative()[-1] == 1000 - 64


def test_the_counters_of_the_status_page_are_plain_numbers() -> None:
    """The measures beside them are no part of that page."""
    numbers = Counters(hits=3).to_json()
    assert numbers["hits"] == 3
    assert all(type(number) is int for number in numbers.values())
