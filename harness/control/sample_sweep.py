"""The sweep for samples that have left their sessions: rollouts that wait for a trainer meet their next version too.

The trainer keeps its queue and goes on taking from it; a sample that is gone by the time its scores arrive was consumed
as it was. Only engines whose sampled logprobs are raw can score: a sample does not say at which temperature its tokens
were sampled. It does say when a grammar or a least length held a turn of it; such a sample is counted and left alone.
"""

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
    """Score what waits for the live version `request.version` in `samples`, replacing them in place.

    The engines share the work. Raises `EngineRejected` when none of them can score samples; what fails for one sample
    is counted.
    """
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
    # Each engine has a share of the requests at once: one that never answers keeps its share, and no other's samples.
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
    return not sample.metadata.get("constrained_turns")


def _waiting(sample: Sample, version: int) -> int:
    return int(ProximalColumns.of_sample(sample).waiting(version).sum())
