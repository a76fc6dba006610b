"""Caches of KV that earlier questions left, and the index that finds stored passages in prompts."""
