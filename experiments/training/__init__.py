"""One training: its Hydra command, preflight checks, the runner and the ranks, the loop, its workers and its tasks.

May import: config, runs, launching, reports, tracking. Begin reading at run.py, then loop.py and workers.py.
"""
