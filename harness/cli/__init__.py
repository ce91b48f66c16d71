"""The `harness` command: a module or folder per subcommand.

The top layer, which may use everything but imports it inside functions. Start with `main.py`.
"""
