"""Optimizers for sparse updates, which are mostly zero. Read waits.py first, then sparse_adamw.py."""
