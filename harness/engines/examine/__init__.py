"""Examinations of running engines: `doctor` checks one server, `comparison` compares two engines.

Uses the providers in `engines.remote`; nothing in `engines` uses this package. Start with `doctor.py`.
"""
