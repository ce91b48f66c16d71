"""Durable storage of sessions: `SessionStore`, in SQLite and in memory. Start with `base`."""
