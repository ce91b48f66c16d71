"""Engine servers over HTTP: the SGLang and vLLM providers and what they share.

Uses `engines.base`, `engines.pool.placement` and `server_patch`. Start with `provider.py`, then `sglang.py` or
`vllm.py`.
"""
