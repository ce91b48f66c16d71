"""The script format of every engine."""

PARAMETER = "force_ids"


def read_script(parameters: object, *, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the script in `parameters`, or (). Raises `ValueError`, which both engines answer as 400."""
    script = parameters.get(PARAMETER) if isinstance(parameters, dict) else None
    if script is None:
        return ()
    if not isinstance(script, list) or not all(type(item) is int and item >= 0 for item in script):
        raise ValueError(f"{PARAMETER}: expected a list of token ids, got {script!r:.100}")
    if vocab_size is not None and any(item >= vocab_size for item in script):
        raise ValueError(f"{PARAMETER}: token id {max(script)} is out of vocabulary, which has {vocab_size}")
    return tuple(script)
