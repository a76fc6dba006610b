"""ragcache inside llama.cpp: passages' states set, shifted and joined in its context, by llama-cpp-python's functions.

Nothing here is imported without the extra `llamacpp`. Only `context` calls llama.cpp.
"""
