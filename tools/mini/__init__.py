"""Makes the bundled models and the example corpus, over the registry (`ragcache_eval.registry`).

`python -m tools.mini.base` trains mini-base and `python -m tools.mini.reuse` goes on from it to mini.
`python -m tools.mini.evaluate` measures mini and mini-base, and `python -m tools.mini.corpus` writes `examples/corpus`.
"""
