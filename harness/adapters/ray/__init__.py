"""Rollouts on the nodes of a Ray cluster; see docs/scaling.md. Programs import its names from `harness`."""
