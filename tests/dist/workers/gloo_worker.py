"""A worker whose last rank ends in the way the file ``job`` says, while the others wait for it in a collective.

The job may have a second word, abort: the others end by SIGABRT when the collective fails, as C++ libraries do.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.launching.rank_process import recorded_errors


def end(job: str) -> None:
    if job == "raise":
        raise ValueError("loss is not finite at step 12")
    if job == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[job])


def main(run_dir: Path) -> None:
    job, *aborts = (run_dir / "job").read_text().split()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))  # all have met
    if dist.get_rank() == dist.get_world_size() - 1:
        end(job)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        if aborts:
            os.abort()
        raise


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with recorded_errors(folder, int(os.environ["RANK"])):
        main(folder)
