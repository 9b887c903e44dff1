"""A plan in time, on paper: how long passes and hand-offs take (times), what follows for the ring (events, waves). No torch."""
