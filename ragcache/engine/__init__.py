"""Retrieve, load or compute, fuse, generate."""
