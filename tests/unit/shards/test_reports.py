"""The answers of several shards as one."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from harness.gateway.shards.front import add_counts, merge_metrics, merge_sweeps, merge_weights
from harness.gateway.shards.shard import ShardCounts
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.weights.weight_update import LiveWeights, SweepReport

COUNT = st.integers(0, 1000)


@given(st.lists(st.builds(ShardCounts, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT), max_size=5))
def test_counts_add_up(counts: list[ShardCounts]):
    """Each by itself, and of no shard they are none."""
    total = add_counts(counts)
    assert total.sessions == sum(each.sessions for each in counts)
    assert total.released == sum(each.released for each in counts)


def test_a_sweep_is_as_long_as_its_longest_part_and_over_when_all_are():
    """A shard that did not answer is a failure of its own code; none is no entry."""
    parts = [
        SweepReport(3, sessions=1, tokens_left=5, failures={"engine_error": 1}, seconds=2.0, is_running=False),
        SweepReport(3, sessions=2, tokens_left=7, failures={"engine_error": 2}, seconds=1.0),
    ]
    merged = merge_sweeps(parts, {"shard_unavailable": 1, "other": 0})

    assert (merged.version, merged.sessions, merged.tokens_left, merged.seconds) == (3, 3, 12, 2.0)
    assert merged.failures == {"engine_error": 3, "shard_unavailable": 1}
    assert merged.is_running


def test_a_worker_that_one_shard_has_fenced_serves_nobody():
    """Whatever the others say; and of one that says nothing there is a line."""
    answers = [LiveWeights(2, {"a": "2", "b": "2"}, {}), LiveWeights(2, {"a": "2"}, {"b": "1"})]
    assert merge_weights(answers, ("shard 2: silent",)) == LiveWeights(2, {"a": "2"}, {"b": "1"}, ("shard 2: silent",))


def test_pages_of_metrics_are_one_page_that_a_scraper_reads():
    """Families stay together, and each sample says whose it is."""
    one, two = ServerMetrics(), ServerMetrics()
    one.errors.labels("gate_closed").inc()
    two.errors.labels("gate_closed").inc()
    two.turns_in_flight.set_function(lambda: 7)
    families = list(text_string_to_metric_families(merge_metrics({"0": one.render(), "1": two.render()}).decode()))

    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value for each in families for sample in each.samples
    }
    assert samples["harness_errors_total", ("code", "gate_closed"), ("shard", "0")] == 1.0
    assert samples["harness_turns_in_flight", ("shard", "0")] == 0.0
    assert samples["harness_turns_in_flight", ("shard", "1")] == 7.0
    assert {dict(key[1:])["shard"] for key in samples} == {"0", "1"}
