"""The throttled store of the benchmarks keeps its rates, and ends with its owner."""

from hypothesis import given
from hypothesis import strategies as st

from support.stores.throttled_s3 import CREDIT_S, Pacer

MB = 1_000_000


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 300_000)), min_size=1, max_size=50))
def test_a_pacer_never_lets_more_than_its_rate_pass(asked: list[tuple[float, int]]) -> None:
    """Between any two releases pass the rate times the time between them, and the credit, at most."""
    pacer, now_s, released = Pacer(MB, CREDIT_S, 0.0), 0.0, []
    for idle_s, size_bytes in asked:
        now_s += idle_s
        now_s = max(now_s, pacer.due_s(size_bytes, now_s))
        released.append((now_s, size_bytes))
    for i, (start_s, _) in enumerate(released):
        for j in range(i + 1, len(released)):
            passed_bytes = sum(size_bytes for _, size_bytes in released[i + 1 : j + 1])
            assert passed_bytes <= MB * (released[j][0] - start_s + CREDIT_S) + 1e-3
