"""This machine: processes, clocks, deadlines, connections, files, logs.

May use `harness.errors` only. Start with `deadlines.py`.
"""
