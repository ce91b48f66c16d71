"""The `harness` command, its subcommands by kind; imports other rooms inside functions. Start with `main.py`."""
