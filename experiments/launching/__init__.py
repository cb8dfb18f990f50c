"""The ranks of a run: which rank this process is, starting them by torch's elastic agent, and why they failed.

May import: config, runs. Begin reading at rank_environment.py and elastic.py, then failures.py and stalls.py.
"""
