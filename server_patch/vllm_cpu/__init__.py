"""vLLM on a machine with few cores that do other things, too: for the servers that we start ourselves."""
