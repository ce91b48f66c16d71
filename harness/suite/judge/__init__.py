"""Judge a run: rewards, verdicts, token accounts. May use record and scenarios.

Start with `verdicts.py` and `accounting.py`.
"""
