"""Run a suite: services, rollouts, weight updates, interrupts, report.

May use scenarios, record, judge and faults. Start with `runner.py`.
"""
