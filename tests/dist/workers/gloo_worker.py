"""A worker whose last rank does what the file ``job`` says, while the others wait for it in a collective.

The job may have a second word: early, before the ranks have met; abort: the others end by SIGABRT when the collective
fails, as C++ libraries do. In the job "still" all ranks stand in a step, and none waits in a collective.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.config.stopping import end_process
from experiments.launching.failures import recorded_errors
from experiments.launching.stalls import notes
from experiments.runs.run_folder import RunFolder

LIMIT_S = 5.0
STEP_LIMIT_S = 0.5  # a step that takes twice as long ends its process


def end(job: str) -> None:
    if job == "raise":
        raise ValueError("loss is not finite\nat step 12")
    if job == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[job])


def main(run_dir: Path) -> None:
    job, *how = (run_dir / "job").read_text().split()
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if how == ["early"] and rank == last:
        end(job)
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=LIMIT_S)))
    limit = timedelta(seconds=LIMIT_S if job == "SIGSTOP" or how == ["early"] else 300)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=last + 1, timeout=limit
    )
    step_limit_s = STEP_LIMIT_S if job == "still" else LIMIT_S
    with notes.kept(RunFolder(run_dir), dist.PrefixStore("notes", store), step_limit_s):
        notes.begin("step", 6)
        dist.all_reduce(torch.ones(1))  # all have met
        notes.begin("step", 7)
        if job == "still":
            time.sleep(1000)
        if rank == last:
            while job == "SIGSTOP" and b'"step": 7' not in store.get(f"notes/note/{rank}"):  # it is sent once a second
                time.sleep(0.05)
            end(job)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            if how == ["abort"]:
                os.abort()
            raise


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        with recorded_errors(RunFolder(folder), int(os.environ["RANK"])):
            main(folder)
    except Exception:
        end_process(1)
