"""Fusion methods of papers that the package itself does not need, one file each."""
