"""Embedders with limits."""

from ragcache_demo.bag_of_words import BagOfWords


class FourWords(BagOfWords):
    """Reads four words of a text and drops the others."""

    max_tokens = 4

    def count_tokens(self, texts):
        return [len(text.split()) for text in texts]

    def embed_query(self, text):
        return super().embed_query(" ".join(text.split()[:4]))
