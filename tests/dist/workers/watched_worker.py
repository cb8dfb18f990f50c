"""A rank that torchrun or srun started, without torch: ``watched_worker.py RUN_DIR RANK TIMEOUT_S``; rank 1 stands."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from experiments.launching.watching.beats import Waiting, activity, beat_path, read_beat
from experiments.launching.watching.joined_watch import watched_rank

run_dir, rank, timeout_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
began = time.monotonic()
activity.begin("step 7")
with watched_rank(run_dir, rank, timeout_s):
    (run_dir / f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        while read_beat(beat_path(run_dir, rank)) is None:  # a rank without a beat is not known to the others
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        activity.waiting = lambda: Waiting("all_reduce", began, 5)
    threading.Event().wait()
