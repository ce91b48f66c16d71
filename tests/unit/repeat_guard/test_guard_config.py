"""The guard's mapping travels whole, and a wrong one names its key."""

import json
from pathlib import Path
from typing import Any

import pytest

from server_patch.repeat_terminate import ConfigError, RepeatTerminateConfig
from server_patch.repeat_terminate.config import CONFIG_JSON, CONFIG_JSON_PATH, ENABLE

CUSTOM = {
    "enabled": True,
    "min_new_tokens": 32,
    "max_consecutive_token_repeats": 8,
    "ngram_size": 12,
    "ngram_repeats": 3,
    "max_object_keys": 128,
}


def test_the_defaults_are_documented_values() -> None:
    assert RepeatTerminateConfig().to_mapping() == {
        "enabled": False,
        "min_new_tokens": 256,
        "max_consecutive_token_repeats": 64,
        "ngram_size": 64,
        "ngram_repeats": 2,
        "max_object_keys": None,
    }


def test_every_key_travels_through_the_environment() -> None:
    config = RepeatTerminateConfig.from_mapping(CUSTOM)

    assert config.to_mapping() == CUSTOM
    assert RepeatTerminateConfig.from_environ(config.to_environ()) == config
    assert RepeatTerminateConfig.from_environ({CONFIG_JSON_PATH: "inherited.json", **config.to_environ()}) == config


def test_the_mapping_may_lie_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    path.write_text(json.dumps(CUSTOM))

    config = RepeatTerminateConfig.from_environ({ENABLE: "1", CONFIG_JSON_PATH: str(path)})

    assert config == RepeatTerminateConfig.from_mapping(CUSTOM)


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [
        ({}, False),
        ({ENABLE: "0"}, False),
        ({ENABLE: "", CONFIG_JSON: '{"enabled": true}'}, False),
        ({ENABLE: "1"}, True),
        ({ENABLE: "1", CONFIG_JSON: "{}"}, True),
        ({ENABLE: "1", CONFIG_JSON: '{"enabled": true}'}, True),
        ({ENABLE: "1", CONFIG_JSON: '{"enabled": false}'}, False),
    ],
)
def test_the_guard_is_wanted_when_the_switch_is_on_and_the_mapping_does_not_object(
    environ: dict[str, str], enabled: bool
) -> None:
    config = RepeatTerminateConfig.from_environ(environ)

    assert (config is not None and config.enabled) is enabled


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"ngram": 4}, "ngram: no such key; expected one of enabled, min_new_tokens"),
        ({"enabled": 1}, "enabled: expected true or false, got 1"),
        ({"min_new_tokens": -1}, "min_new_tokens: expected an integer of at least 0, got -1"),
        ({"min_new_tokens": True}, "min_new_tokens: expected an integer of at least 0, got True"),
        ({"ngram_size": "64"}, "ngram_size: expected an integer of at least 0, got '64'"),
        ({"ngram_repeats": 2.0}, "ngram_repeats: expected an integer of at least 0, got 2.0"),
        ({"max_consecutive_token_repeats": 1}, "max_consecutive_token_repeats: expected 0 .off. or at least 2, got 1"),
        (
            {"enabled": True, "max_consecutive_token_repeats": 0, "ngram_repeats": 1},
            "enabled: expected a rule that is on",
        ),
        ({"max_object_keys": 0}, "max_object_keys: expected an integer of at least 1 or null .off., got 0"),
    ],
)
def test_a_wrong_mapping_names_the_key_and_what_was_expected(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RepeatTerminateConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({ENABLE: "yes"}, f"{ENABLE}: expected 1"),
        ({ENABLE: "1", CONFIG_JSON: "{"}, f"{CONFIG_JSON}: expected a JSON object, got text that is not JSON"),
        ({ENABLE: "1", CONFIG_JSON: "[1]"}, f"{CONFIG_JSON}: expected a JSON object, got"),
        ({ENABLE: "1", CONFIG_JSON_PATH: "/nowhere.json"}, f"{CONFIG_JSON_PATH}: expected a readable file"),
        ({ENABLE: "1", CONFIG_JSON: "{}", CONFIG_JSON_PATH: "/nowhere.json"}, "are both set"),
        ({ENABLE: "1", CONFIG_JSON: '{"ngram_sizes": 4}'}, "ngram_sizes: no such key"),
    ],
)
def test_a_wrong_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RepeatTerminateConfig.from_environ(environ)


def test_a_digest_names_the_whole_mapping() -> None:
    """The order of the keys does not matter, every value does."""
    digest = RepeatTerminateConfig.from_mapping(CUSTOM).digest()

    assert digest == RepeatTerminateConfig.from_mapping(dict(reversed(CUSTOM.items()))).digest()
    assert digest != RepeatTerminateConfig.from_mapping({**CUSTOM, "ngram_repeats": 4}).digest()
