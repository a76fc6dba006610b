"""`ragcache watch`: a store that follows folders."""
