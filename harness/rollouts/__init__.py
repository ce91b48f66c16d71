"""Rollouts: agents run against session servers. Trainers import this room.

Uses `harness.control` and `harness.client`. Start with `manager.py`.
"""
