"""Answers that another engine computes."""
