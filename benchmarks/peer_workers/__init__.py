"""A program per peer, run by the Python of the peer's own environment: it imports only the software that it times."""
