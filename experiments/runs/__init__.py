"""A run on disk: its folder, records, checkpoints, manifest and status, and how it is cleaned up or run again.

May import: config. Begin reading at records.py, then checkpoints.py.
"""
