"""One address for several servers: `shards/` for session servers, `router/` for an SGLang router and its workers.

Uses `server`, `rollouts` and what these use. Start with `shards/front.py` or `router/routed.py`.
"""
