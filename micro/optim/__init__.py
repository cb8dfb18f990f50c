"""Optimizers for updates that are mostly zero. Begin reading at waits.py, then sparse_adamw.py."""
