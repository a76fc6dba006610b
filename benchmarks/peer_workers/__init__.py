"""One program a peer, each run by the Python of the peer's own environment: it imports what it times, no more."""
