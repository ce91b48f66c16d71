"""Control of engines and session servers together. Start with `abort.py` or `weights.py`."""
