"""One training: preflight checks, the runner, the main of a rank, the loop, its workers and its tasks.

May import: config, runs, launching, reports, tracking. Begin reading at run.py, then loop.py and workers.py.
"""
