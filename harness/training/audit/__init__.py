"""Audit: why an engine's logprobs differ from those of the trainer's weights. Start with `audit.py`."""
