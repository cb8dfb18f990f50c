"""Fits: estimate the k-th magnitude of a vector, one file per method."""
