"""Record of steps: database tables, ledgers and telemetry.

May use `sessions`, `store` and the values of `collector`. Start with `step_table.py`.
"""
