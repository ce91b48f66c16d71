"""Scenarios: file format, folders, and plan of rollouts. May use engines, models and rollouts.

Start with `scenario.py`.
"""
