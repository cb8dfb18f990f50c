"""Processes: the ranks of a run, worker processes and groups of ranks for tools, hosts as network namespaces.

May import: config, runs. Begin reading at launch.py for a run, then at watching/ for what ends it; for tools, at
worker_process.py, then rank_group.py.
"""
