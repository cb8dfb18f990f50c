"""Fits: ways to estimate the k-th magnitude of a vector, one file each."""
