"""The steps of an update of one engine server's weights, as a proxy or a fake server sees them."""

STEPS = {
    ("vllm", "announce"): ("/update_weight_version", 0),
    ("vllm", "load"): ("/collective_rpc", 0),
    ("vllm", "flush"): ("/reset_prefix_cache", 0),
    ("vllm", "label"): ("/update_weight_version", 1),
    ("vllm", "continue"): ("/resume", 0),
    ("sglang", "announce"): ("/update_weight_version", 0),
    ("sglang", "load"): ("/update_weights_from_disk", 0),
    ("sglang", "continue"): ("/continue_generation", 0),
}
"""Of a server, the call that each step of an update is, and which of those to that path."""
