"""What follows a run: progress on the terminal, the W&B mirror, and the three sources of figures.

May import: config, runs, launching, reports. Begin reading at progress.py.
"""
