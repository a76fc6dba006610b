"""Care of a store: its figures, the check that repairs it, pins."""
