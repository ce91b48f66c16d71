"""The guard's configuration: one flat mapping, equal for every engine.

Unknown keys and bad values are errors, so a misspelled limit never means "no limit". Environment variables:

    HARNESS_REPEAT_TERMINATE_ENABLE=1                 the switch; without it the guard is off
    HARNESS_REPEAT_TERMINATE_CONFIG_JSON={...}        the mapping, or
    HARNESS_REPEAT_TERMINATE_CONFIG_JSON_PATH=file    a file with it; setting both is an error
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
"""Text whose tokens `max_object_keys` counts, encoded without special tokens."""

_SWITCH = {"": False, "0": False, "1": True}


class ConfigError(ValueError):
    """Invalid configuration of the guard."""


@dataclass(frozen=True)
class RepeatTerminateConfig:
    enabled: bool = False
    min_new_tokens: int = 256
    """Tokens before which no rule triggers."""
    max_consecutive_token_repeats: int = 64
    """Identical tokens in a row that trigger; 0: off."""
    ngram_size: int = 64
    """Length of the n-gram at the end of the output; 0: off."""
    ngram_repeats: int = 2
    """Back-to-back n-grams that trigger; 0 and 1: off."""
    max_object_keys: int | None = None
    """Occurrences of the tokens of `"object_` that trigger; None: off."""

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
        """Parse `mapping`, with defaults. Raises `ConfigError`."""
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise ConfigError(f"{key}: no such key; expected one of {', '.join(known)}")
        return cls(**mapping)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "RepeatTerminateConfig | None":
        """Read the environment; None if the guard is off. Raises `ConfigError`."""
        switch = environ.get(ENABLE, "")
        _expect(switch in _SWITCH, ENABLE, "1 (on), or 0 or nothing (off)", switch)
        if not _SWITCH[switch]:
            return None
        # An explicit `"enabled": false` wins over the switch.
        config = cls.from_mapping({"enabled": True, **_travelled(environ)})
        return config if config.enabled else None

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def to_environ(self) -> dict[str, str]:
        """Return variables that give another process this configuration."""
        return {ENABLE: str(int(self.enabled)), CONFIG_JSON: self._canonical(), CONFIG_JSON_PATH: ""}

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def _canonical(self) -> str:
        return json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"))

    @property
    def ngram_matches(self) -> int:
        """Length of the run of n-gram matches that triggers; 0: off."""
        return self.ngram_size * max(self.ngram_repeats - 1, 0)


def _travelled(environ: Mapping[str, str]) -> Mapping[str, Any]:
    text, path = environ.get(CONFIG_JSON), environ.get(CONFIG_JSON_PATH)
    if text and path:
        raise ConfigError(f"{CONFIG_JSON} and {CONFIG_JSON_PATH} are both set; set one of them")
    if not path:
        return _decoded(text, CONFIG_JSON) if text else {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_JSON_PATH}: expected a readable file with JSON, got {path}: {error}") from error
    return _decoded(text, f"{CONFIG_JSON_PATH} ({path})")


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
