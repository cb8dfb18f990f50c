"""A sweep of three runs that goes on after a run that failed, as Hydra's does: ``sweep.py FOLDER JOB``."""

import sys
from pathlib import Path

from experiments.config.stopping import exit_code
from experiments.launching.launch import launch
from experiments.runs.stop_signals import stop_signals

for number in range(3):
    run_dir = Path(sys.argv[1]) / str(number)
    run_dir.mkdir()
    (run_dir / "job").write_text(sys.argv[2])
    try:
        launch(run_dir, module="idle_worker", nproc_per_node=2, run_id=str(number))
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
    if stop_signals.number:
        sys.exit(exit_code(stop_signals.number))
