"""Fusion methods and codecs of papers that the package itself does not need, one file each."""
