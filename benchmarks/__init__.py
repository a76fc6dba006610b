"""Benchmarks of ragcache and the runner that they share: `python -m benchmarks` lists them."""
