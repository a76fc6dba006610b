"""Makes the bundled models and the example corpus, over the registry (`ragcache.evaluation.registry`).

`python -m tools.mini.base` trains mini-base and `python -m tools.mini.reuse` goes on from it to mini;
`python -m tools.mini.evaluate` measures both, and `python -m tools.mini.corpus` writes `examples/corpus`.
"""
