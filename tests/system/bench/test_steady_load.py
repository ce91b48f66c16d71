"""`soak/steady_load.py` tells what grows from what does not."""

from soak.steady_load import Vitals, judge


def vitals(minute: float, rss_mib: float = 100.0, store_mib: float = 5.0, tasks: int = 30) -> Vitals:
    """What a server holds then."""
    return Vitals(minute * 60, rss_mib, store_mib, descriptors=40, threads=6, tasks=tasks)


def test_what_grows_is_told_from_what_does_not() -> None:
    """Memory by its slope once it has settled; the rest by what it had come to by the middle."""
    steady = judge([vitals(minute, rss_mib=100 + 50 * (minute < 5) + 0.2 * minute) for minute in range(20)])
    leaking = judge([vitals(minute, 100 + minute, 5 + minute, 30 + minute) for minute in range(20)])

    assert all(bar.holds for bar in steady)
    assert {bar.what for bar in leaking if not bar.holds} == {"memory, MiB a minute", "store_mib", "tasks"}
