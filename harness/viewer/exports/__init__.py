"""Exports of a run for other programs: metric stores and OpenTelemetry.

Uses the viewer's report and views. Start with `export.py`.
"""
