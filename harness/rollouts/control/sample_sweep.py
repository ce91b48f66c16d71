"""Recomputed logprobs of samples in a trainer's queue. Samples lack their temperature, so raw logprobs only."""

import time
from collections.abc import MutableSequence, Sequence

from harness.engines.base import LogprobScale, TokenProvider
from harness.errors import EngineError, EngineRejected
from harness.machine.deadlines import work_through
from harness.samples.proximal import ProximalColumns, sample_scoring_start, score_sample
from harness.samples.versions import is_version
from harness.sessions.weights.weight_update import SweepReport, SweepRequest
from harness.types import Sample


async def sweep_samples(
    engines: Sequence[TokenProvider], samples: MutableSequence[Sample], request: SweepRequest
) -> SweepReport:
    """Score tokens that wait for `request.version`, replacing samples. Raises `EngineRejected` if no engine can."""
    able = [engine for engine in engines if engine.capabilities.logprob_scale is LogprobScale.RAW]
    if not able:
        raise EngineRejected("samples are scored by engines that report raw logprobs, and none of these does")
    began = time.monotonic()
    every = [sample for sample in samples if _waiting(sample, request.version)]
    waiting = [sample for sample in every if _is_comparable(sample)]
    report = SweepReport(request.version, sessions=len(waiting))
    report.tokens_waiting = report.tokens_left = sum(_waiting(sample, request.version) for sample in waiting)
    report.tokens_incomparable = sum(_waiting(each, request.version) for each in every if not _is_comparable(each))
    at_once = min(request.concurrency, len(waiting))
    # Each engine has a share of the concurrency: one that never answers blocks its own share only.
    idle = [able[number % len(able)] for number in range(at_once)]

    async def score(sample: Sample) -> None:
        engine = idle.pop()
        try:
            await _score(engine, sample, samples, report)
        except EngineError as error:
            report.failures[error.code] = report.failures.get(error.code, 0) + 1
        finally:
            idle.append(engine)
        report.sessions_done += 1

    await work_through(iter(waiting), score, at_once=at_once, seconds=request.budget_s)  # what is left is counted
    report.seconds, report.is_running = time.monotonic() - began, False
    return report


async def _score(engine: TokenProvider, sample: Sample, samples: MutableSequence[Sample], report: SweepReport) -> None:
    start = sample_scoring_start(sample, report.version)
    input_ids = sample.tokens[: engine.capabilities.context_length - 1]  # as long as a server reads
    if start is None or start >= input_ids.size:
        return
    report.requests += 1
    report.tokens_read += int(input_ids.size)
    scoring = await engine.score(input_ids, start=start, session_id=sample.metadata.get("session_id"))
    scored = score_sample(sample, scoring)
    position = next((i for i, each in enumerate(samples) if each is sample), None)
    if is_version(scoring.version, report.version) and position is not None:  # else it was consumed as it was
        samples[position] = scored
        settled = _waiting(sample, report.version) - _waiting(scored, report.version)
        report.tokens_settled += settled
        report.tokens_left -= settled


def _is_comparable(sample: Sample) -> bool:
    return not sample.metadata.get("constrained_turns")  # sampled under a grammar or a minimum length


def _waiting(sample: Sample, version: int) -> int:
    return int(ProximalColumns.of_sample(sample).waiting(version).sum())
