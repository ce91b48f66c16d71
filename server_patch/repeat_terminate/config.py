"""The guard's configuration: one flat mapping, checked whole, the same for every engine.

A mapping with an unknown key or a bad value is refused, so that a misspelt limit never means "no limit". The mapping
travels to another process as JSON in the environment:

    HARNESS_REPEAT_TERMINATE_ENABLE=1                 the switch; without it the guard is off, whatever else is set
    HARNESS_REPEAT_TERMINATE_CONFIG_JSON={...}        the mapping itself, or
    HARNESS_REPEAT_TERMINATE_CONFIG_JSON_PATH=file    a file with it; naming both is an error

Switched on without a mapping, the defaults hold. In a mapping that the switch turned on, `enabled` need not be said;
an explicit `"enabled": false` wins over the switch.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ENABLE = "HARNESS_REPEAT_TERMINATE_ENABLE"
CONFIG_JSON = "HARNESS_REPEAT_TERMINATE_CONFIG_JSON"
CONFIG_JSON_PATH = "HARNESS_REPEAT_TERMINATE_CONFIG_JSON_PATH"

OBJECT_KEY_TEXT = '"object_'
"""The text whose tokens `max_object_keys` counts; the engine's tokenizer encodes it, without special tokens."""

_SWITCH = {"": False, "0": False, "1": True}


class ConfigError(ValueError):
    """The guard's configuration is wrong; the message names the key, what was expected and what came."""


@dataclass(frozen=True)
class RepeatTerminateConfig:
    """When a generation counts as degenerate repetition. Lengths are in generated tokens."""

    enabled: bool = False
    """Off unless a mapping, or the switch in the environment, says otherwise."""
    min_new_tokens: int = 256
    """Nothing triggers while fewer tokens have been generated."""
    max_consecutive_token_repeats: int = 64
    """This many identical tokens in a row trigger; 0 turns the rule off."""
    ngram_size: int = 64
    """Length of the n-gram at the end of the output; 0 turns the rule off."""
    ngram_repeats: int = 2
    """The n-gram at the end, this many times back to back, triggers; 0 and 1 turn the rule off."""
    max_object_keys: int | None = None
    """This many occurrences of the tokens of `"object_` trigger; None turns the rule off."""

    def __post_init__(self) -> None:
        _expect(isinstance(self.enabled, bool), "enabled", "true or false", self.enabled)
        _expect_at_least(0, "min_new_tokens", self.min_new_tokens)
        _expect_at_least(0, "max_consecutive_token_repeats", self.max_consecutive_token_repeats)
        # One token is always a run of one: such a limit would end every generation.
        _expect(
            self.max_consecutive_token_repeats != 1,
            "max_consecutive_token_repeats",
            "0 (off) or at least 2",
            self.max_consecutive_token_repeats,
        )
        _expect_at_least(0, "ngram_size", self.ngram_size)
        _expect_at_least(0, "ngram_repeats", self.ngram_repeats)
        if self.max_object_keys is not None:
            _expect_at_least(1, "max_object_keys", self.max_object_keys, otherwise=" or null (off)")
        if self.enabled and not (self.max_consecutive_token_repeats or self.ngram_matches or self.max_object_keys):
            raise ConfigError(
                "enabled: expected a rule that is on, got none; set max_consecutive_token_repeats, ngram_size with"
                " ngram_repeats, or max_object_keys"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "RepeatTerminateConfig":
        """The configuration that `mapping` states, defaults for the rest; raises `ConfigError`."""
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise ConfigError(f"{key}: no such key; expected one of {', '.join(known)}")
        return cls(**mapping)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "RepeatTerminateConfig | None":
        """The configuration of this process, None when the guard is not wanted; raises `ConfigError`."""
        switch = environ.get(ENABLE, "")
        _expect(switch in _SWITCH, ENABLE, "1 (on), or 0 or nothing (off)", switch)
        if not _SWITCH[switch]:
            return None
        config = cls.from_mapping({"enabled": True, **_travelled(environ)})
        return config if config.enabled else None

    def to_mapping(self) -> dict[str, Any]:
        """All keys with their values, as they travel."""
        return asdict(self)

    def to_environ(self) -> dict[str, str]:
        """The variables that give another process this configuration, whatever it inherits."""
        return {ENABLE: str(int(self.enabled)), CONFIG_JSON: self._canonical(), CONFIG_JSON_PATH: ""}

    def digest(self) -> str:
        """SHA-256 of the mapping in canonical JSON: two processes with one digest decide alike."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def _canonical(self) -> str:
        return json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"))

    @property
    def ngram_matches(self) -> int:
        """Tokens in a row that must equal the one `ngram_size` before them; 0 when the rule is off."""
        return self.ngram_size * max(self.ngram_repeats - 1, 0)


def _travelled(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The mapping in the environment, empty when there is none."""
    text, path = environ.get(CONFIG_JSON), environ.get(CONFIG_JSON_PATH)
    if text and path:
        raise ConfigError(f"{CONFIG_JSON} and {CONFIG_JSON_PATH} are both set; set one of them")
    if path:
        return _decoded(_read(path), f"{CONFIG_JSON_PATH} ({path})")
    return _decoded(text, CONFIG_JSON) if text else {}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_JSON_PATH}: expected a readable file with JSON, got {path}: {error}") from error


def _decoded(text: str, source: str) -> Mapping[str, Any]:
    try:
        mapping = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: expected a JSON object, got text that is not JSON: {error}") from error
    _expect(isinstance(mapping, dict), source, "a JSON object", mapping)
    checked: Mapping[str, Any] = mapping
    return checked


def _expect_at_least(least: int, key: str, value: object, *, otherwise: str = "") -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    _expect(is_integer and value >= least, key, f"an integer of at least {least}{otherwise}", value)  # type: ignore[operator]


def _expect(holds: bool, key: str, expected: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{key}: expected {expected}, got {value!r}")
