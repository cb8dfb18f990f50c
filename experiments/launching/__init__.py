"""Launch the ranks of a run with torch's elastic agent, identify this process's rank, and explain failures.

May import: config, runs. Begin reading at rank_environment.py and elastic.py, then failures.py and stalls.py.
"""
