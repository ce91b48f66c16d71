"""A tool server: each rollout starts its own, so its state is the rollout's."""

from mcp.server import MCPServer

server = MCPServer("warehouse")
STOCK = {"apples": 12, "pears": 7}


@server.tool()
def count(item: str) -> int:
    """Return how many of an item are in stock."""
    return STOCK[item]


if __name__ == "__main__":
    server.run()  # over standard input and output
