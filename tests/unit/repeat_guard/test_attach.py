"""The guard's way into an engine's process: it is in, or the process ends with a line that says what to do."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import server_patch.repeat_terminate
from server_patch.repeat_terminate import RepeatTerminateConfig
from server_patch.repeat_terminate.attach import Guard, NotAttached, attach_guard, learning_object_keys, wrap
from server_patch.repeat_terminate.config import CONFIG_JSON, ENABLE

ON_PATH = Path(server_patch.repeat_terminate.__path__[0]) / "on_path"


class Engine:
    """Something to patch."""

    def stop(self, token: int) -> bool:
        return token == 0


def doubled(original, engine: Engine, token: int) -> bool:
    return original(engine, token * 2)


def test_a_patch_answers_for_what_it_patches() -> None:
    """It gets the original and all arguments, and is set once however often it is asked for."""
    owner = type("Owner", (), {"stop": lambda self, token: token == 4})
    wrap(owner, "stop", doubled)
    wrap(owner, "stop", doubled)

    assert (owner().stop(2), owner().stop(4)) == (True, False)


def test_a_missing_target_is_named() -> None:
    """A method that only a base class has is missing too: patching it would reach others."""
    with pytest.raises(NotAttached, match=r"there is no function .*Engine\.halt"):
        wrap(Engine, "halt", doubled)
    with pytest.raises(NotAttached, match="there is no function"):
        wrap(type("Other", (Engine,), {}), "stop", doubled)


def test_a_patch_that_does_not_take_is_noticed() -> None:
    class Stubborn(type):
        def __setattr__(cls, name: str, value: object) -> None:
            pass

    with pytest.raises(NotAttached, match="did not take the patch"):
        wrap(Stubborn("Owner", (), {"stop": lambda self, token: True}), "stop", doubled)


def test_without_the_switch_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENABLE, raising=False)
    attach_guard("X", lambda guard: pytest.fail("patched"))


def refused(monkeypatch: pytest.MonkeyPatch, config: str, error: Exception | None = None) -> str:
    """What a process says that ends because the guard could not be attached."""

    def patch(guard: Guard) -> None:
        if error is not None:
            raise error

    monkeypatch.setenv(ENABLE, "1")
    monkeypatch.setenv(CONFIG_JSON, config)
    with pytest.raises(SystemExit) as ended:
        attach_guard("EngineX", patch)
    return str(ended.value)


@pytest.mark.parametrize(
    ("config", "named"), [('{"ngram": 4}', "ngram"), ('{"ngram_size": -1}', "ngram_size"), ("{", CONFIG_JSON)]
)
def test_a_wrong_configuration_ends_the_process(monkeypatch: pytest.MonkeyPatch, config: str, named: str) -> None:
    message = refused(monkeypatch, config)

    assert f"its configuration is wrong: {named}" in message
    assert f"{ENABLE}=0" in message


@pytest.mark.parametrize("error", [NotAttached("there is no function a.b"), ImportError("no module a.b")])
def test_an_engine_of_another_version_ends_the_process(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """SGLang logs any other exception of a plugin, and serves without it."""
    message = refused(monkeypatch, "{}", error)

    assert "this EngineX cannot be guarded" in message
    assert "a.b" in message


def test_object_keys_need_a_tokenizer() -> None:
    """A server that was started without one cannot count them."""
    config = RepeatTerminateConfig(enabled=True, max_object_keys=4)
    guard = Guard(config, config.digest())
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text), add_special_tokens])
    learning_object_keys(guard, lambda scheduler: scheduler.tokenizer)(vars, SimpleNamespace(tokenizer=tokenizer))

    assert guard.object_key_ids == [8, False]
    with pytest.raises(SystemExit, match="runs without one; set it to null"):
        learning_object_keys(guard, lambda scheduler: None)(vars, SimpleNamespace())


SCHEDULER = "class Scheduler:\n    pass\ndef check_stop(request, longest):\n    return False\n"
STATUS = "class RequestStatus:\n    FINISHED_REPETITION = 7\n"
ASK = """
import vllm.v1.core.sched.scheduler as scheduler
from types import SimpleNamespace
request = SimpleNamespace(output_token_ids=[], prompt_token_ids=[], sampling_params=SimpleNamespace(extra_args=None))
for token in [5] * 9:
    request.output_token_ids.append(token)
    if scheduler.check_stop(request, 100):
        break
print(len(request.output_token_ids), getattr(request, "stop_reason", None))
"""


@pytest.fixture(name="engine_dir")
def _engine_dir(tmp_path: Path) -> Path:
    """An engine with a scheduler like vLLM's, and a `sitecustomize` of its own."""
    for path, text in (("vllm/v1/core/sched/scheduler.py", SCHEDULER), ("vllm/v1/request.py", STATUS)):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.stderr.write('another sitecustomize ran\\n')\n")
    return tmp_path


def run_engine(path: list[Path], config: str | None) -> "subprocess.CompletedProcess[str]":
    """A process of the engine, which has nothing of ours but what is on `path`."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HARNESS_")}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if config is not None:
        environ |= {ENABLE: "1", CONFIG_JSON: config}
    # -S: no site-packages, where this project is installed; the path still counts.
    code = f"import sitecustomize\n{ASK}"
    return subprocess.run([sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, check=False)


RUN_OF_FOUR = '{"min_new_tokens": 1, "max_consecutive_token_repeats": 4}'


@pytest.mark.parametrize("times", [1, 2])
def test_a_folder_on_the_path_is_enough(engine_dir: Path, times: int) -> None:
    """Nothing is installed; a `sitecustomize` that stands behind ours runs as well."""
    done = run_engine([*[ON_PATH] * times, engine_dir], RUN_OF_FOUR)

    assert (done.stdout, done.returncode) == ("4 repeat_terminate\n", 0), done.stderr
    assert "another sitecustomize ran" in done.stderr


def test_a_folder_on_the_path_refuses_a_wrong_configuration_too(engine_dir: Path) -> None:
    done = run_engine([ON_PATH, engine_dir], '{"min_new": 1}')

    assert done.returncode == 1
    assert "min_new: no such key" in done.stderr


def test_a_folder_on_the_path_does_nothing_without_the_switch(engine_dir: Path) -> None:
    assert run_engine([ON_PATH, engine_dir], None).stdout == "9 None\n"
