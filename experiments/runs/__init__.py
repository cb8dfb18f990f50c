"""A run on disk: its folder, records, checkpoints, manifest and status, and how it is cleaned up or run again.

May import: config. Begin reading at run_folder.py, then checkpoints.py and saving.py.
"""
