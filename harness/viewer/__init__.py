"""Views of a run, session, turn and token as plain values, and their rendering in a terminal, a page and reports.

Uses everything below `harness.cli` and only reads. Start with `look.py`, then `run_view.py` and `session_view.py`.
"""
