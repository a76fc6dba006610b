"""Blocks of retrieved chunks: loaded or computed, whichever is faster by measured rates."""
