"""Answer quality of every fusion method, measured the same way, and the gate that says which are safe for a model."""
