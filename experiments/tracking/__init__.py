"""Track runs: progress on the terminal, the W&B mirror, and reading runs back from W&B.

May import: config, runs, launching, reports. Begin reading at progress.py.
"""
