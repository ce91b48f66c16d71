"""Readers that turn sampled ids into reasoning, content and calls. Start with `output_stream.py`."""
