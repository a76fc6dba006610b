"""An annex of ragcache: folders that a store follows."""
