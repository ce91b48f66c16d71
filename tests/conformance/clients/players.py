"""Programs with real client libraries, and what tells them where a session is."""

from pathlib import Path

from harness.engines.scripted import ScriptStep

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 60  # several interpreters start at once on few cores


def call(a: int, b: int) -> ScriptStep:
    """A turn that calls the tool."""
    return ScriptStep(text=f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>')


def variables_of(url: str, key: str) -> dict[str, str]:
    """How client libraries find the session at `url`."""
    variables = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), key)
    variables |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1")
    variables |= dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL"), url)
    return {**variables, "NO_PROXY": "127.0.0.1"}
