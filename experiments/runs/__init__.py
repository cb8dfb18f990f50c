"""A run on disk: its folder, records, checkpoints, manifest and status.

May import: config. Begin reading at run_folder.py, then checkpoints.py and saving.py.
"""
