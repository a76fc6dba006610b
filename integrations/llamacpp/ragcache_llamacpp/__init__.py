"""An engine that runs llama.cpp in this process, by llama-cpp-python: it sets passages' states in llama.cpp's context,
shifts them to their positions, and joins them to a prompt.

Without the extra `llamacpp` only `entry` is imported. Only `context` calls llama.cpp.
"""
