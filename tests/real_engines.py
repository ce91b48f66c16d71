"""Real SGLang and real vLLM for tests: one server of each per test session, started when the first test wants it.

They serve the model of the tests (`shallow_model`) in float32, where the engines agree to five digits. Every test that
asks for one of the fixtures `sglang_url` and `vllm_url` is put into one xdist group, so that one worker owns both
servers and only one of them computes at a time: two at once on two cores are many times slower than one after the
other. The servers end when the worker comes to tests of no such group, for each holds gigabytes; and with the worker,
however it ends. `HARNESS_SGLANG_URL` and `HARNESS_VLLM_URL` name servers that run already (`harness engine up`), which
saves their start; they have to be on this machine, with the arguments and the environment below. The repeat guard is on
in both, with limits that only its own tests reach: nobody else may notice it.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from harness.lab.lanes import INSTALLED, LaneEngine, LaneSpec, open_lane
from tests.looping_prompt import SERVED_CONFIG
from tests.shallow_model import made_once

CONTEXT_TOKENS = 4096
"""Of both servers: enough for an agent's session, few enough to fill in a test."""

SLOTS = 16
"""Requests that each server works on at once; more of them wait."""

# Several servers may live at once beside the tests' own models: the cache holds what the tests need and not more.
_ARGUMENTS = {
    LaneEngine.SGLANG: (
        *("--context-length", str(CONTEXT_TOKENS), "--max-running-requests", str(SLOTS)),
        *("--max-total-tokens", "24000"),
    ),
    LaneEngine.VLLM: ("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SLOTS)),
}
_ENVIRONMENT = {
    # As a server comes: a lane switches this off, and what it does while paused is one of the traps that are tested.
    LaneEngine.SGLANG: {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1", **SERVED_CONFIG.to_environ()},
    LaneEngine.VLLM: {"VLLM_CPU_KVCACHE_SPACE": "1", **SERVED_CONFIG.to_environ()},
}
_GROUP = "real-engines"
_TEST_S = 1200  # the first test of an engine installs and starts it
_RELABEL_S = 600  # on a machine that does ten other things


def in_environment_of(*engines: LaneEngine) -> list[pytest.MarkDecorator]:
    """Marks of what needs `engines` installed, and no server; `-m sglang` and `-m vllm` select by them."""
    return [*(getattr(pytest.mark, engine.value) for engine in engines), pytest.mark.timeout(_TEST_S)]


def on_real(*engines: LaneEngine) -> list[pytest.MarkDecorator]:
    """Marks of what needs servers of `engines`: they run on one worker."""
    return [*in_environment_of(*engines), pytest.mark.xdist_group(_GROUP)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a server, before xdist looks at their groups."""
    for item in items:
        for engine in INSTALLED:
            if f"{engine}_url" in getattr(item, "fixturenames", ()):
                for mark in on_real(engine):
                    item.add_marker(mark)


class Servers:
    """The servers of this worker that run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._urls: dict[LaneEngine, str] = {}

    def url(self, engine: LaneEngine, model_dir: Path) -> str:
        """Address of the server of `engine`, which is started when it does not run."""
        if url := os.environ.get(f"HARNESS_{engine.upper()}_URL"):
            return url
        if engine not in self._urls:
            spec = LaneSpec(engine, model_dir, env=_ENVIRONMENT[engine], arguments=_ARGUMENTS[engine])
            portal = self._stack.enter_context(start_blocking_portal())
            self._urls[engine] = self._stack.enter_context(portal.wrap_async_context_manager(open_lane(spec))).url
        return self._urls[engine]

    def end(self) -> None:
        """End those that run."""
        self._urls.clear()
        self._stack.close()


_SERVERS = pytest.StashKey[Servers]()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing runs yet; what runs when pytest ends is ended."""
    config.stash[_SERVERS] = servers = Servers()
    config.add_cleanup(servers.end)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the servers after the last test that uses them; without xdist, tests of all kinds come in any order."""
    if hasattr(item.config, "workerinput") and _uses_a_server(item) and not _uses_a_server(nextitem):
        item.config.stash[_SERVERS].end()


def _uses_a_server(item: pytest.Item | None) -> bool:
    return item is not None and any(mark.args == (_GROUP,) for mark in item.iter_markers("xdist_group"))


@pytest.fixture(name="sglang_url")
def _sglang_url(model_dir: Path, pytestconfig: pytest.Config) -> str:
    """Address of the SGLang server."""
    return pytestconfig.stash[_SERVERS].url(LaneEngine.SGLANG, model_dir)


@pytest.fixture(name="vllm_url")
def _vllm_url(model_dir: Path, pytestconfig: pytest.Config) -> str:
    """Address of the vLLM server."""
    return pytestconfig.stash[_SERVERS].url(LaneEngine.VLLM, model_dir)


@pytest.fixture(scope="session", name="perturbed_dir")
def _perturbed_dir(model_dir: Path, pytestconfig: pytest.Config) -> Path:
    """The model of the tests with noise in its weights, in the same files."""
    return made_once(pytestconfig, "perturbed", lambda folder: _write_perturbed(model_dir, folder))


@pytest.fixture(scope="session", name="unfit_dir")
def _unfit_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tensors of the same names and other shapes."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("unfit")
    shutil.copy(model_dir / "config.json", folder)
    with safe_open(model_dir / "model.safetensors", framework="pt") as weights:
        save_file({name: torch.zeros(2, 2) for name in weights.keys()}, folder / "model.safetensors")  # noqa: SIM118
    return folder


def _write_perturbed(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    noisy = {
        name: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(noisy, target / "model.safetensors", metadata={"format": "pt"})


@asynccontextmanager
async def of_one_version(*urls: str, label: str = "") -> AsyncIterator[None]:
    """The shared engines have one label while the block runs, else one of them would serve nobody; then their own.

    It is `label`, or the highest of theirs.
    """
    async with httpx.AsyncClient(timeout=_RELABEL_S) as http:

        async def relabel(url: str, version: str) -> None:
            body = {"new_version": version, "abort_all_requests": False}
            (await http.post(f"{url}/update_weight_version", json=body)).raise_for_status()

        labels = [await label_of(http, url) for url in urls]
        highest = max((int(each) for each in labels if each.isdecimal()), default=0)
        try:
            for url in urls:
                await relabel(url, label or str(highest))
            yield
        finally:
            for url, before in zip(urls, labels, strict=True):
                await relabel(url, before)


async def label_of(http: httpx.AsyncClient, url: str) -> str:
    """The name of the weights that the engine at `url` serves."""
    answers = [await http.get(url + path) for path in ("/model_info", "/weight_info")]  # of SGLang, of vLLM
    [label] = {answer.json()["weight_version"] for answer in answers if answer.is_success}
    return str(label)
