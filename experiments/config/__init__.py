"""From command-line words to a checked run: schema, composition, run identity, optimizer and SLURM settings, errors.

May import: nothing else of experiments. Begin reading at schema.py, then compose.py.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
CONF = ROOT / "conf"  # the files of the configuration
