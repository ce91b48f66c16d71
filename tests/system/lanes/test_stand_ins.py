"""The stand-ins do what SGLang's CPU path needs, and refuse to stand in for real kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

PATH = ROOT / "server_patch" / "sglang_cpu" / "path"
FAKE_TORCH = "class version:\n    cuda = {cuda!r}\n"

PROGRAM = """
import torch
from sgl_kernel import assign_req_to_token_pool_cpu
table = torch.zeros(4, 6, dtype=torch.int32)
rows, starts, ends = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 4]), torch.tensor([4, 2, 4])
assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.arange(11, 16), 6)
print(table.tolist())

from sgl_kernel import verify_tree_greedy_cpu
try:
    verify_tree_greedy_cpu(1)
except NotImplementedError as error:
    print(error)

try:
    from sgl_kernel import silu_and_mul
except ImportError as error:
    print(error)
"""


def python(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": ":".join(str(folder) for folder in (PATH, *folders))}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def test_new_tokens_get_their_slots_and_other_kernels_are_not_there() -> None:
    """Request 2 at positions 1 to 3, request 0 at 0 and 1, request 3 nothing.

    SGLang imports the functions of speculative decoding wherever it runs on a CPU; they say what they are.
    """
    ended = python(PROGRAM)

    assert ended.returncode == 0, ended.stderr
    slots, speculative, other = ended.stdout.splitlines()
    assert slots == str([[14, 15, 0, 0, 0, 0], [0] * 6, [0, 11, 12, 13, 0, 0], [0] * 6])
    assert speculative.startswith("the CPU stand-in for sgl_kernel does not implement verify_tree_greedy_cpu")
    assert other.startswith("cannot import name 'silu_and_mul'")


@pytest.mark.parametrize("program", ["import sgl_kernel", "import torchvision"])
def test_beside_a_cuda_build_of_torch_they_refuse(program: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(cuda="13.0"))
    answer = python(program, tmp_path)

    assert (answer.returncode, "from PYTHONPATH" in answer.stderr) == (1, True)


def test_operators_are_declared_before_torchvision_runs(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text(
        "import torch; print(torch.ops.torchvision.nms, torch.ops.torchvision.qnms)"
    )

    assert python("import torchvision", tmp_path).stdout.split() == ["torchvision.nms", "torchvision.qnms"]


def test_another_sitecustomize_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('ran')")

    assert python("print('program')", tmp_path).stdout.split() == ["ran", "program"]
