"""Real engines and models on this machine: `lanes/` starts SGLang and vLLM on a CPU, `models/` fetches small weights.

Trainers never need it. Uses `machine` and `errors`. Start with `lanes/lane.py` or `models/resolve.py`.
"""
