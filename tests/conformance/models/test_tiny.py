"""The model that is made here is the same everywhere, and what transformers and the harness expect of a model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.lab.models import get_model
from harness.machine.cache import sha256_of
from harness.tokens.model_family import open_chat_tokenizer

NAME = "tiny-random-qwen3"
WEIGHTS_SHA256 = "8ad6e7ad7271face678fc2635ccb937b8c959c64ff120105275eea522a396fdf"


@pytest.fixture(scope="module", name="folder")
def _folder() -> Path:
    return get_model(NAME)


def test_every_machine_makes_the_same_weights(folder: Path) -> None:
    """Tests may name tokens that it samples greedily."""
    assert sha256_of(folder / "model.safetensors") == WEIGHTS_SHA256


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_finds_every_weight_it_wants(folder: Path) -> None:
    """No tensor is missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)

    assert {name: set(found) for name, found in loading.items() if found} == {}


def test_its_ids_are_those_of_its_tokenizer(folder: Path) -> None:
    """Whatever it samples can be read, and its ids of ends are those that the real template writes."""
    config, tokenizer = json.loads((folder / "config.json").read_text()), open_chat_tokenizer(folder).tokenizer

    assert config["vocab_size"] == tokenizer.vocab_size
    assert tokenizer.encode("<|im_end|><|endoftext|>") == [151_645, 151_643]


def test_without_npm_it_says_what_to_do(tmp_path: Path) -> None:
    """The only thing that is fetched is the tokenizer."""
    environment = os.environ | {"PATH": str(tmp_path), "HARNESS_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "harness", "model", "get", NAME]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert (ended.returncode, "npm is needed" in ended.stderr, "check that npm" in ended.stderr) == (6, True, True)
