"""An attachment's state in a checkpoint: its form, one state for every rank, another number of ranks.

Imports reducers and what lies below them, never a driver. Begin with saved_state: the form of a checkpoint.
"""
