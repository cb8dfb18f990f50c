"""Check the runs of a study in a separate process, so that the command that submits them does not import torch.

``python -m experiments.sweeps.check_process`` reads pickled configurations from its standard input.
"""

import pickle
import subprocess
import sys
from collections.abc import Sequence

from experiments.config.command_line import run_command
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.launching.child_environment import child_environment


def check_in_process(configs: Sequence[TrainConfig]) -> None:
    """Check the parts and the data of each run, as before a training. Raises: UserError."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.sweeps.check_process"],
        input=pickle.dumps(list(configs)),
        stderr=subprocess.PIPE,
        env=child_environment(),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(lines[-1].removeprefix("error: "))


def _check() -> int:
    from experiments.training.preflight import check_runs

    check_runs(pickle.load(sys.stdin.buffer))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_check))
