"""Remotes for stores that several machines share: object stores and Redis."""
