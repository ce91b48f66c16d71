"""Merging of shard reports into one report of the front. Pure.

Counts are summed. Reports about a shard itself stay side by side, by shard number. A shard without an answer adds a
problem line. Where shards disagree about a worker, the worst report wins.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness.gateway.shards.desired_state import ShardCounts
from harness.sessions.weights.weight_update import LiveWeights, SweepReport

_SUMS = tuple(
    name for name in SweepReport.__struct_fields__ if name not in ("version", "failures", "seconds", "is_running")
)
_SAMPLE = re.compile(rb"^([A-Za-z_:][\w:]*)(\{(.*)\})?( .*)$")


def add_counts(counts: Iterable[ShardCounts]) -> ShardCounts:
    columns = list(zip(*map(msgspec.structs.astuple, counts), strict=True))
    return ShardCounts(*map(sum, columns))


def merge_sweeps(reports: Sequence[SweepReport], problems: Mapping[str, int]) -> SweepReport:
    """Merge sweeps; `problems` counts unanswered shards by error code."""
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMS}
    failures = Counter({code: count for code, count in problems.items() if count})
    for report in reports:
        failures.update(report.failures)
    return SweepReport(
        version=max(report.version for report in reports),
        failures=dict(failures),
        seconds=max(report.seconds for report in reports),
        is_running=any(report.is_running for report in reports),
        **sums,
    )


def merge_weights(answers: Sequence[LiveWeights], problems: tuple[str, ...]) -> LiveWeights:
    """Merge worker versions: a worker is fenced if any shard fenced it."""
    fenced = {worker: version for answer in answers for worker, version in answer.fenced.items()}
    serving = {worker: version for answer in answers for worker, version in answer.serving.items()}
    serving = {worker: version for worker, version in serving.items() if worker not in fenced}
    return LiveWeights(answers[0].version, serving, fenced, problems)


def merge_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Merge metrics pages, adding a `shard` label to each sample."""
    families: dict[bytes, list[bytes]] = {}
    heads: dict[bytes, list[bytes]] = {}
    for shard, page in pages.items():
        family = b""
        for line in page.splitlines():
            if line.startswith(b"# "):
                family = line.split(maxsplit=3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif sample := _SAMPLE.match(line):
                name, _, labels, value = sample.groups()
                own = b'shard="%s"' % shard.encode() + (b"," + labels if labels else b"")
                families.setdefault(family, []).append(b"%s{%s}%s" % (name, own, value))
    lines = (line for family in heads for line in (*heads[family], *families.get(family, ())))
    return b"".join(line + b"\n" for line in lines)
