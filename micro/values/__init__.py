"""Vectors and numbers: layouts, sparse values, norms, scales, clipping, checks for NaN and Inf."""
