"""Engine lanes: real SGLang and vLLM servers on this machine's CPU, each in an environment of its own."""

from harness.lanes.lane import down, find_lanes, open_lane, start_lane
from harness.lanes.spec import Dtype, LaneEngine, LaneSpec
from harness.lanes.state import Lane

__all__ = ["Dtype", "Lane", "LaneEngine", "LaneSpec", "down", "find_lanes", "open_lane", "start_lane"]
