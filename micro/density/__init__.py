"""Density policies: how many elements to send at each step, one file per policy."""
