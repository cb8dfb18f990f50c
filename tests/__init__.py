"""The tests; a package, so that all of them can import the table of methods."""
