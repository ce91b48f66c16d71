"""The `harness` command, a module or folder per subcommand; imports others inside functions. Start with `main.py`."""
