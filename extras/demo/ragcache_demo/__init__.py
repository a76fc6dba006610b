"""`ragcache demo`: questions over the example corpus or a folder, by the default method and by full prefill."""
