"""Entry points: each module here runs as ``python -m experiments.NAME``."""

import re
import sys

from experiments.config import stopping

if sys.argv[:1] == ["-m"] and re.search(r" -m experiments\.\w+( |$)", " ".join(sys.orig_argv)):
    stopping.begin_command()  # Python imports this package before it runs an entry point
