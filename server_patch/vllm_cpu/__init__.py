"""vLLM on a machine with few cores, for our own servers."""
