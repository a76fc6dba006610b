"""Makes the bundled models and the example corpus, over the registry (`ragcache_eval.registry`).

`python -m tools.mini.base` trains mini-base and `python -m tools.mini.reuse` goes on from it to mini;
`python -m tools.mini.long` grows mini-long from mini-base and `python -m tools.mini.reuse_pages` goes on from that.
`python -m tools.mini.evaluate` measures mini and mini-base, and `python -m tools.mini.corpus` writes `examples/corpus`.
"""
