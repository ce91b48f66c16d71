"""`harness verify`: what it prints, and the exit code that says it."""

import json
from pathlib import Path

import pytest

from harness.tokens.verify import Property
from tests.harness_command import harness
from tests.toy_model import write_toy_model


def test_a_family_that_keeps_its_promises_passes(tmp_path: Path):
    """Every property is a line, with how many conversations it was checked on; of a template of ours, by its name."""
    folder = write_toy_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not this one') }}", encoding="utf-8")

    ended = harness("verify", "tokens", "--tokenizer", str(folder), "--template", "chatml_hermes")

    lines = [line for line in ended.stdout.splitlines() if line.startswith(("pass", "FAIL"))]
    assert (ended.code, len(lines)) == (0, len(Property))
    assert all(line.startswith("pass") and "0 refused, 0 branch" in line for line in lines)
    assert "answer -> user: cached suffix" in ended.stdout


def test_a_broken_promise_fails_and_shows_the_first_mismatch(tmp_path: Path):
    """A template that renders calls in another way than models of its kind are read."""
    folder = write_toy_model(tmp_path)
    template = tmp_path / "broken.jinja"
    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template.write_text(source.replace('"arguments": ', '"args": '), encoding="utf-8")

    ended = harness("verify", "tokens", "--tokenizer", str(folder), "--template", str(template), "--json")

    report = json.loads(ended.stdout)
    [broken] = [entry for entry in report["properties"] if not entry["holds"]]
    assert (ended.code, report["passed"], broken["name"]) == (1, False, "calls")
    assert broken["mismatch"]["conversation"] == "user [assistant with calls] tool with tools"
    assert "France" in broken["mismatch"]["expected"]


UNREADABLE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}calling {{ call.function.name }}: {{ call.function.arguments }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


UNREAD_THOUGHTS = UNREADABLE.replace("{{ m.content }}", "{{ m.reasoning_content }} So: {{ m.content }}")


@pytest.mark.parametrize(
    ("source", "lost"), [(UNREADABLE, "tool calls"), (UNREAD_THOUGHTS, "reasoning")], ids=["calls", "reasoning"]
)
def test_a_family_whose_calls_or_reasoning_cannot_be_read_fails(tmp_path: Path, source, lost):
    """No property is contradicted: where calls are, the session branches, and nothing is compared."""
    folder, template = write_toy_model(tmp_path), tmp_path / "unreadable.jinja"
    template.write_text(source, encoding="utf-8")

    ended = harness("verify", "tokens", "--tokenizer", str(folder), "--template", str(template))

    assert [line for line in ended.stdout.splitlines() if line.startswith("FAIL")] == []
    assert (ended.code, f"fault        {lost} cannot be read" in ended.stdout) == (1, True)


@pytest.mark.parametrize("shards", [(), ("--shards", "2", "--store", "stores")])
def test_a_strict_server_refuses_such_a_family(tmp_path: Path, shards):
    """At its start, with the reason; no shard is started."""
    folder, template = write_toy_model(tmp_path), tmp_path / "unreadable.jinja"
    template.write_text(UNREADABLE, encoding="utf-8")
    serving = ("serve", "--engine", "scripted", "--port", "0", "--tokenizer", str(folder), "--template", str(template))

    ended = harness(*serving, "--strict", *shards, cwd=tmp_path)

    assert "--strict: expected a model family that loses nothing; tool calls cannot be read" in ended.stderr
    assert (ended.code, ended.stdout, (tmp_path / "stores").exists()) == (4, "", False)


def test_a_missing_tokenizer_renderer_or_template_is_named(tmp_path: Path):
    """With the code of a tokenizer that cannot be used, and the names that there are."""
    assert "tokenizer.json" in harness("verify", "tokens", "--tokenizer", str(tmp_path)).stderr
    folder = write_toy_model(tmp_path)
    for option, known in (("renderer", "expected auto, none or one of"), ("template", "deepseek_v3, gpt_oss, mistral")):
        ended = harness("verify", "tokens", "--tokenizer", str(folder), f"--{option}", "nope")
        assert (ended.code, known in ended.stderr) == (6, True)


@pytest.mark.model
def test_an_engine_that_says_the_same_is_close(model_dir: Path):
    """Exit code 0 and figures for readers and programs; an engine nobody knows is a usage error."""
    same = harness("verify", "engine", "scripted", "scripted", "--model", str(model_dir), "--json")
    unknown = harness("verify", "engine", "scripted", "magic", "--model", str(model_dir))

    assert same.code == 0, same.stderr
    report = json.loads(same.stdout)
    assert (report["is_close"], report["same_tokens"], report["largest"]) == (True, 8, 0.0)
    assert (unknown.code, "no engine 'magic'" in unknown.stderr) == (4, True)
