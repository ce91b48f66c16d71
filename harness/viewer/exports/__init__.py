"""Exports of a run for metric stores and OpenTelemetry. Start with `export.py`."""
