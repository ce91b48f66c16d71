"""Answer of `--dry-run`: what a run would run. Nothing is started, fetched or written."""

from harness.cli import output
from harness.suite.record.config import SuiteSelection
from harness.suite.scenarios.folder import ScenarioFolder
from harness.types import Json


def print_dry_run(
    selection: SuiteSelection, concurrency: int | None, *, as_json: bool, steps: int | None = None
) -> None:
    wanted = selection.config.overrides
    scenarios = [_plan(folder, concurrency, wanted.server, steps) for folder in selection.folders]
    plan: Json = {"suite": selection.config.suite, "steps": steps, "scenarios": scenarios}
    output.print_result({"dry_run": plan}, _text(plan), as_json=as_json)


def _plan(folder: ScenarioFolder, concurrency: int | None, server: str | None, steps: int | None) -> Json:
    scenario, prompts = folder.scenario, len(folder.prompts)
    sessions = folder.session_count
    if steps is not None and scenario.train is not None:
        sessions = steps * scenario.train.budget
    engine = {"server": server} if server else {"name": scenario.engine.name, "model": scenario.engine.model}
    services = scenario.services.model_dump(mode="json") if scenario.services is not None else {}
    return {
        "scenario": folder.name,
        "sessions": sessions,
        "prompts": prompts,
        "samples_per_prompt": scenario.samples_per_prompt,
        "concurrency": concurrency or scenario.concurrency,
        "engine": engine | {name: each for name, each in services.items() if each},
        "agent": scenario.agent.name,
        "deadline_s": scenario.agent.deadline_s,
        "limits": scenario.limits.model_dump(exclude_none=True),
        "is_scored": folder.check is not None or scenario.harbor is not None,
        "faults": len(scenario.faults),
    }


def _text(plan: Json) -> str:
    steps = "" if plan["steps"] is None else f", {plan['steps']} steps"
    lines = [f"would run {plan['suite']}{steps}; nothing was started"]
    for each in plan["scenarios"]:
        size = f"{each['sessions']} sessions, {each['prompts']} prompts x {each['samples_per_prompt']} samples"
        lines += [
            f"{each['scenario']}: {size}, {each['concurrency']} at a time",
            f"  engine  {_listed(each['engine'])}",
            f"  agent   {each['agent']}, {each['deadline_s']:g} s at most",
            f"  limits  {_listed(each['limits']) or 'none'}",
            f"  scored  {'yes' if each['is_scored'] else 'no'}",
        ]
        lines += [f"  faults  {each['faults']}"] if each["faults"] else []
    return "\n".join(lines)


def _listed(values: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
