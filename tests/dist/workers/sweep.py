"""A sweep of three runs that continues after a failed run, like Hydra's: ``sweep.py FOLDER JOB``."""

import sys
from pathlib import Path

from experiments.config.schema import ClusterConfig
from experiments.config.stopping import exit_code
from experiments.launching.elastic import start_ranks
from experiments.runs.run_folder import RunFolder

for number in range(3):
    folder = RunFolder(Path(sys.argv[1]) / str(number))
    folder.path.mkdir()
    (folder.path / "job").write_text(sys.argv[2])
    try:
        stopped = start_ranks(folder, "idle_worker", ClusterConfig(name="local", nnodes=1, nproc_per_node=2))
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
    else:
        if stopped:
            sys.exit(exit_code(stopped))
