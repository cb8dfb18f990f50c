"""WHICH indices: one file per method. A new file with a `Selector` in it is found by itself."""
