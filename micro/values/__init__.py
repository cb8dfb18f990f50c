"""Vectors and numbers: layouts, sparse values, norms, scales, clipping, and what is finite."""
