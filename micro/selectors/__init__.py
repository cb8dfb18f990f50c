"""Selectors: choose which indices to send, one file per method. New files here are found without registration."""
