"""A question, from its text to the last token of its answer."""
