"""`harness engine` and `sandboxes`: inference servers on this machine, and sandboxes that killed managers left."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.cli.installation.doctor import EngineModel, examine_engine
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from harness.lab.lanes import Lane

engine_app = typer.Typer(help="Start, end and examine SGLang, vLLM and local servers.", no_args_is_help=True)

_Engine = Annotated[str, typer.Argument(help="`sglang`, `vllm` or `local`.")]
_Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Passed to the server unchanged.")
]
_Model = Annotated[str, options.option("HARNESS_MODEL", "Catalogue name, folder or hub id.")]
_Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port on the loopback interface.  [default: a free one]")
]
_Env = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment of the server; may be repeated.")
]
_Target = Annotated[str | None, typer.Argument(help="Name, address or engine; not needed if only one lane is up.")]


@engine_app.command("up")
def up(
    engine: _Engine,
    arguments: _Arguments = None,
    *,
    model: _Model = "smollm2-135m-instruct",
    port: _Port = None,
    dtype: Annotated[str, typer.Option(help="`float32`, or `bfloat16`, which rounds.")] = "float32",
    env: _Env = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds to wait until it generates.")] = 600.0,
    as_json: options.Json = False,
) -> None:
    """Start a server, installing its engine first if missing, and print the address once it generates.

    `local` is the HuggingFace engine of the harness, in this environment; clients use it as sglang=URL. Examples:
    `harness engine up sglang`, `harness engine up vllm --port 8100 -- --max-model-len 4096`
    """
    from harness.cli.download import fetch
    from harness.lab.lanes import Dtype, LaneEngine, LaneSpec, start_lane

    if engine not in list(LaneEngine):
        raise typer.BadParameter(f"no engine {engine!r}; expected one of {', '.join(LaneEngine)}")
    if dtype not in list(Dtype):
        raise typer.BadParameter(f"no dtype {dtype!r}; expected one of {', '.join(Dtype)}")
    variables: dict[str, str] = {}
    for assignment in env or ():
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--env: expected NAME=VALUE, got {assignment!r}")
        variables[name] = value
    folder = fetch(model)
    spec = LaneSpec(LaneEngine(engine), folder, port, Dtype(dtype), variables, tuple(arguments or ()))
    lane = asyncio.run(start_lane(spec, say=output.say, deadline_s=deadline))
    output.say(f"use it with --engine {lane.provider}; stop it with: harness engine down {lane.name}")
    output.print_result(lane.to_json(), lane.url, as_json=as_json)


@engine_app.command("down")
def down(
    target: _Target = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every lane.")] = False,
    as_json: options.Json = False,
) -> None:
    """Stop servers that `up` started; having none to stop is no error.

    Examples: `harness engine down sglang-8200`, `harness engine down vllm`, `harness engine down --all`
    """
    from harness.lab.lanes import down as end_lane
    from harness.lab.lanes import find_lanes

    chosen = _choose(find_lanes(), target, every=every)
    ended = [lane.name for lane in chosen if end_lane(lane)]
    said = "\n".join(f"ended {name}" for name in ended) or "nothing to end"
    output.print_result({"ended": ended}, said, as_json=as_json)


@engine_app.command("list")
def list_lanes(as_json: options.Json = False) -> None:
    """List the running servers."""
    from harness.lab.lanes import find_lanes

    lanes, lines = find_lanes(), list[str]()
    for lane in lanes:
        state = "ready" if lane.is_ready else "starting"
        held = f", held by process {lane.holder}" if lane.holder is not None else ""
        facts = f"{lane.url}  {lane.model} {lane.dtype}  {state}, pid {lane.pid}{held}  {lane.log}"
        lines.append(f"{lane.name:14} {facts}")
    output.print_result([lane.to_json() for lane in lanes], "\n".join(lines) or "no lane is up", as_json=as_json)


@engine_app.command("doctor")
def doctor(
    url: Annotated[str, typer.Argument(help="Address of an SGLang or vLLM server.")],
    *,
    model: EngineModel = None,
    as_json: options.Json = False,
) -> int:
    """List what the engine server at URL can do, with evidence; it keeps serving other clients.

    Exit code 6 if it lacks something that sessions need. Example: `harness engine doctor http://127.0.0.1:30000`
    """
    return examine_engine(url, model, as_json=as_json)


def _choose(lanes: Sequence["Lane"], target: str | None, *, every: bool) -> Sequence["Lane"]:
    # Lanes that belong to a running program are stopped only when named one by one.
    kept = [lane for lane in lanes if lane.holder is None]
    if every:
        return kept
    if target in {lane.engine for lane in lanes}:
        return [lane for lane in kept if lane.engine == target]
    if target is not None:
        return [lane for lane in lanes if target.rstrip("/") in (lane.name, lane.url, lane.provider)]
    if len(kept) > 1:
        raise typer.BadParameter(f"several lanes are up: name one of {', '.join(lane.name for lane in kept)}, or --all")
    return kept


sandboxes_app = typer.Typer(no_args_is_help=True, help="Remove sandboxes of agents from this machine.")


@sandboxes_app.callback()
def _group() -> None:
    """Keep `prune` a subcommand, although it is the only one."""


@sandboxes_app.command("prune")
def prune(*, as_json: options.Json = False) -> None:
    """Remove the containers, cgroups and folders of sandboxes whose harness was killed.

    Sandboxes of a running harness stay, also on another machine or container. The exit code is 6 if something
    could not be removed.
    """
    from harness.rollouts.sandboxes.boxed import remove_left

    found = asdict(asyncio.run(remove_left()))
    names = {"containers": "container", "cgroups": "cgroup", "folders": "folder", "failures": "failed"}
    lines = [f"{names[kind]:9}  {each}" for kind, items in found.items() for each in items]
    output.print_result(found, "\n".join(lines or ["no sandboxes are left behind"]), as_json=as_json)
    if found["failures"]:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)
