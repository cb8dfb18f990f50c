"""A worker that does what the file ``job`` of its run folder says. It needs no torch, so it starts at once."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from experiments.launching.rank_environment import die_with_parent

die_with_parent()
run_dir = Path(sys.argv[1])
rank = int(os.environ["RANK"])
job = (run_dir / "job").read_text()
(run_dir / f"pid{rank}").write_text(str(os.getpid()))
print(f"hello from rank {rank}, {os.environ['OMP_NUM_THREADS']} threads", flush=True)

if job == "watchdog":
    note = {"host": "h", "pid": 1, "phase": "step", "since": 0.0, "rank": rank, "step": 7, "waited": rank == 0}
    (run_dir / f"ranks/note-{rank}.json").write_text(json.dumps(note))
    while rank or not (run_dir / "ranks/note-1.json").exists():
        time.sleep(0.1)
    print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
    print("  what():  [Rank 0] Watchdog caught collective operation: WorkNCCL timed out", file=sys.stderr)
    sys.stderr.flush()
    os.abort()
if job == "ignore":
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
if job == "wait":
    time.sleep(1000)
if job == "save":
    from experiments.config.stopping import stop_signals

    with stop_signals.recorded():
        (run_dir / f"ready{rank}").touch()
        while not stop_signals.number:
            time.sleep(0.01)
    (run_dir / f"saved{rank}").write_text(str(int(stop_signals.number)))
if job == "restart":
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 1 - start:
        raise ValueError(f"of start {start}")
    time.sleep(1000)
if job == "SIGSEGV":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1000)
