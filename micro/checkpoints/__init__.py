"""Save and load the states of attachments, one per rank, also with another number of ranks.

Imports reducers and the layers below them, never a driver. Begin with saved_state, the format of a state.
"""
