"""Lanes: engine servers on this machine's CPU. Uses `machine` and `errors` only. Start with `lane.py`."""

from harness.lab.lanes.lane import down, find_lanes, open_lane, start_lane
from harness.lab.lanes.spec import INSTALLED, Dtype, Lane, LaneEngine, LaneSpec

__all__ = ["INSTALLED", "Dtype", "Lane", "LaneEngine", "LaneSpec", "down", "find_lanes", "open_lane", "start_lane"]
