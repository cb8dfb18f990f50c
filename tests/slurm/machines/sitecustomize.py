"""Have Python take each node of a test's SLURM for a machine of its own, whose locks the other nodes do not see.

Python imports this at its start from a folder on PYTHONPATH. The disk then is as NFS is where locks are local.
"""

import fcntl
import os

from experiments.runs import owner

fcntl.flock = lambda descriptor, operation: None
owner.machine = lambda: os.environ["SLURMD_NODENAME"]
