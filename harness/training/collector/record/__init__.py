"""Record of steps: tables, ledgers and telemetry. Start with `step_table.py`."""
