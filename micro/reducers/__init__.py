"""Reducers, which turn n gradients into one update: the pipeline of sparse methods, and other methods."""
