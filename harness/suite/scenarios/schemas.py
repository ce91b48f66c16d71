"""JSON schemas of the TOML files that users write, made from the models that read them."""

from collections.abc import Callable, Mapping

import msgspec

from harness.engines.scripted import Script
from harness.rollouts.agents.profile import Profile
from harness.suite.scenarios.scenario import Scenario
from harness.types import Json

SCHEMAS: Mapping[str, Callable[[], Json]] = {
    "scenario": Scenario.model_json_schema,
    "script": lambda: msgspec.json.schema(Script),
    "profile": lambda: msgspec.json.schema(Profile),
}
"""Makers of the schemas, by kind of file."""


def schema_of(kind: str) -> Json:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMAS[kind]()}


def schema_file(kind: str) -> str:
    """Return the name of the schema next to a file."""
    return f"{kind}.schema.json"


def name_schema(kind: str, text: str) -> str:
    """Return a file's `text` with the line that names the schema next to it."""
    return f"#:schema ./{schema_file(kind)}\n{text}"
