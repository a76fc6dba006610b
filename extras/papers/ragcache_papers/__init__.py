"""Fusion methods and codecs of papers that the package itself does not need, each in its own file."""
