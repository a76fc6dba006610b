"""Measures the answers of all fusion methods in the same way, and checks which methods are safe for a model."""
