"""Judge a run: rewards, verdicts, token accounts. Start with `verdicts.py` and `accounting.py`."""
