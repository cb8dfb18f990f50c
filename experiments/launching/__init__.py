"""Processes: start the ranks of a run and watch them, worker processes of tools, hosts as network namespaces.

May import: config, runs. Begin reading at launch.py, then rank_process.py.
"""
