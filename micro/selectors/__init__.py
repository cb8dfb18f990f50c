"""WHICH indices: one file per method. A new file with a `Selector` in it is found without further registration."""
