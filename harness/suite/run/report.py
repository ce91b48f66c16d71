"""Results of a run: printed, in `result.json`, and for `--json`."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.samples.proximal import NextVersions, staleness_telemetry
from harness.sessions.ledger import Ledger, total
from harness.suite.exits import ExitCode
from harness.suite.faults.firing import FaultReport, judge_faults
from harness.suite.judge.groups import PromptRewards, Rewarded, by_prompt, pass_at
from harness.suite.judge.verdicts import Verdict, count_dropped_turns, judge, mean_reward, next_versions, versions_of
from harness.suite.judge.witness import TokenReading, Witness, judge_witness
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.scenarios.folder import ScenarioFolder
from harness.types import Json

_COUNTS = ("turns", "truncated_turns", "repeat_terminated_turns", "tool_calls")
"""Fields of `RecordedSession`. Truncated turns ended by a length limit or the repeat guard."""


class RunStatus(StrEnum):
    """Exit codes have the same names."""

    PASSED = "passed"
    CHECKS_FAILED = "checks_failed"
    INTERRUPTED = "interrupted"
    """Stopped by the user; can be resumed."""
    INFRASTRUCTURE = "infrastructure"
    """Engine or harness failed rollouts; can be resumed."""


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    name: str
    planned: int
    records: Sequence[RolloutRecord]
    verdicts: Sequence[Verdict]
    faults: Sequence[FaultReport] = ()
    replayed: int = 0

    @classmethod
    def of(
        cls,
        folder: ScenarioFolder,
        records: Sequence[RolloutRecord],
        faults: Sequence[FaultReport] = (),
        readings: Sequence[TokenReading] = (),
        replayed: Collection[int] = (),
    ) -> "ScenarioReport":
        """Report on `folder`. `replayed` may include other scenarios' rollouts."""
        scenario = folder.scenario
        verdicts = [
            *judge(scenario.checks, records),
            *judge_faults(faults, expects_all=scenario.checks.expect_faults_fired),
            *(judge_witness(readings) if scenario.checks.expect_witness_agrees else ()),
        ]
        again = sum(record.number in replayed for record in records)
        return cls(scenario.name, folder.session_count, records, verdicts, faults, again)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(record.outcome.value for record in self.records)

    @property
    def counts(self) -> dict[str, int]:
        """Sums over the sessions, by name of a count."""
        return {name: sum(getattr(record.session, name) for record in self.records) for name in _COUNTS}

    @property
    def ledger(self) -> Ledger:
        return total(record.ledger for record in self.records)

    @property
    def dropped_trailing_turns(self) -> int:
        """Turns missing in samples after an incomplete one."""
        return count_dropped_turns(self.records)

    @property
    def remarks(self) -> Counter[str]:
        """Server remarks, with their number of sessions."""
        return Counter(remark for record in self.records for remark in record.session.remarks)

    @property
    def reward(self) -> float | None:
        return mean_reward(self.records)

    @property
    def prompts(self) -> list[PromptRewards]:
        return by_prompt(
            Rewarded(record.scenario, record.group, record.number, record.reward)
            for record in self.records
            if record.reward is not None
        )

    @property
    def pass_at(self) -> dict[int, float]:
        return pass_at(self.prompts)

    @property
    def is_final(self) -> bool:
        """True if no session has to run again."""
        return len(self.records) == self.planned and all(record.is_final for record in self.records)

    def to_json(self) -> Json:
        """Return the form of `result.json`."""
        return {
            "name": self.name,
            "sessions": self.planned,
            "replayed": self.replayed,
            "outcomes": dict(self.outcomes),
            **self.counts,
            "dropped_trailing_turns": self.dropped_trailing_turns,
            "remarks": dict(self.remarks),
            "tokens": self.ledger.generated,
            "reward_mean": self.reward,
            "pass_at": {str(k): share for k, share in self.pass_at.items()},
            "prompts": [prompt.to_json() for prompt in self.prompts],
            "ledger": ledger_json(self.ledger),
            "faults": [fault.to_json() for fault in self.faults],
            "checks": [verdict._asdict() for verdict in self.verdicts],
            "rollouts": [
                {
                    "number": record.number,
                    "group": record.group,
                    "session_id": record.session_id,
                    "outcome": record.outcome.value,
                    "cause": record.cause.value if record.cause else None,
                    "detail": record.detail,
                    "turns": record.session.turns,
                    "tokens": record.ledger.generated,
                    "reward": record.reward,
                    "figures": record.figures,
                    "reason": record.reason,
                    "score": record.score,
                    "score_error": record.score_error,
                    "seconds": round(record.seconds, 3),
                }
                for record in self.records
            ],
        }


@dataclass(frozen=True, slots=True)
class RunReport:
    directory: Path
    status: RunStatus
    scenarios: Sequence[ScenarioReport]
    ledger: Ledger
    """Sum over all sessions, including abandoned attempts."""
    witness: Witness
    samples: int
    has_parquet: bool
    seconds: float
    audit: Json | None = None
    is_guarded: bool = False
    """True if an engine proved its repeat guard."""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode[self.status.name]

    @property
    def is_complete(self) -> bool:
        return self.status in (RunStatus.PASSED, RunStatus.CHECKS_FAILED)

    @property
    def telemetry(self) -> Json:
        """Telemetry for a trainer; the keys are fixed."""
        # Sum per scenario: each has its own weight versions.
        met = [next_versions(scenario.records) for scenario in self.scenarios]
        possible = NextVersions(sum(each.possible for each in met), sum(each.met for each in met))
        return {
            "rollout/repeat_terminate_active": int(self.is_guarded),
            "rollout/repeat_terminate_triggered_sequences": sum(
                each.counts["repeat_terminated_turns"] for each in self.scenarios
            ),
            **staleness_telemetry(
                versions_of(sample)
                for scenario in self.scenarios
                for record in scenario.records
                for sample in record.samples
            ),
            "rollout/proximal_share_of_possible": possible.share,
            **audit_figures(self.audit),
        }

    def to_json(self) -> Json:
        """Return the form of `result.json`."""
        return {
            "status": self.status.value,
            "exit_code": int(self.exit_code),
            "directory": str(self.directory),
            "seconds": round(self.seconds, 3),
            "samples": self.samples,
            "parquet": self.has_parquet,
            "ledger": ledger_json(self.ledger),
            "witness": self.witness.to_json(),
            "telemetry": self.telemetry,
            **({} if self.audit is None else {"audit": self.audit}),
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
        }


def audit_figures(audit: Json | None) -> Json:
    """Return the mean gap in nats, and the share of each cause."""
    if audit is None:
        return {}
    return {"audit/gap": audit["gap"], **{f"audit/{each['cause']}": each["nats"] for each in audit["shares"]}}


def status_of(scenarios: Sequence[ScenarioReport], *, was_interrupted: bool) -> RunStatus:
    if not all(scenario.is_final for scenario in scenarios):
        return RunStatus.INTERRUPTED if was_interrupted else RunStatus.INFRASTRUCTURE
    holds = all(verdict.holds for scenario in scenarios for verdict in scenario.verdicts)
    return RunStatus.PASSED if holds else RunStatus.CHECKS_FAILED


def ledger_json(ledger: Ledger) -> Json:
    """Return the ledger and its difference, which is 0."""
    return {**ledger.to_json(), "difference": ledger.difference}
