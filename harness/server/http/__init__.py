"""HTTP of the session server: clients, permissions, bodies, responses. Start with `connection`."""
