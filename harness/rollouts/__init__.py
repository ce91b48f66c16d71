"""Rollouts: agents run against session servers. Trainers import this room.

Uses `harness.rollouts.control` and `harness.rollouts.client`. Start with `manager.py`.
"""
