"""What there is to see of a run, a session, a turn and a token, as plain values; and their rendering on a terminal."""
