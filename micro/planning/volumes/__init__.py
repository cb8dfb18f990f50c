"""The collectives that a method calls for one bucket and their sizes, from which its cost on any network follows.

Begin reading at reducers.py. A sparse method's calls are those of its selection (selection.py) and of its exchange
(exchanges.py), both computed from a step in steady state (sparse_step.py); two_levels.py puts two levels together.
"""

from micro.planning.volumes.calls import Call, Calls, Volume
from micro.planning.volumes.reducers import calls_of, volume_of

__all__ = ["Call", "Calls", "Volume", "calls_of", "volume_of"]
