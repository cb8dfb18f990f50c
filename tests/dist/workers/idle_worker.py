"""A worker that does what the file ``job`` of its run folder says. It needs no torch, so it starts at once."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path


def miss_the_collective() -> None:
    """Loop and never reach the collective of the other rank."""
    while True:
        time.sleep(0.01)


run_dir = Path(sys.argv[1])
rank = int(os.environ["RANK"])
job = (run_dir / "job").read_text()
(run_dir / f"pid{rank}").write_text(str(os.getpid()))
print(f"hello from rank {rank}, {os.environ['OMP_NUM_THREADS']} threads", flush=True)
(run_dir / f"gc{rank}").write_text(str(gc.get_threshold()[2]))

if job in ("stand", "miss", "compute"):
    from experiments.launching.watching.beats import Waiting, activity

    activity.begin("step 7")
if job == "stand" and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if job in ("stand", "miss") and rank == 0:
    since = time.monotonic()
    activity.waiting = lambda: Waiting("all_reduce", since, 5)
    threading.Event().wait()  # as native code waits: no signal of Python's is handled
if job in ("stand", "miss"):
    miss_the_collective()
if job == "compute":
    time.sleep(8)
if job == "wait":
    time.sleep(1000)
if job == "save":
    from experiments.launching.rank_process import announce_saving
    from experiments.runs.stop_signals import stop_signals

    with stop_signals.recorded(signal.SIGTERM):
        announce_saving(run_dir)
        while not stop_signals.number:
            time.sleep(0.01)
    (run_dir / f"saved{rank}").touch()
if job == "raise" and rank == 1:
    raise ValueError("loss is not finite\nat step 12")
if job == "exit" and rank == 1:
    os._exit(3)
if job == "SIGSEGV" and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
if job in ("raise", "exit", "SIGSEGV"):
    time.sleep(1000)
if job == "raise beside a thread":
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("the thread must not keep this from being seen")
if job == "leave":
    sys.exit("nothing to do here")
if job.startswith("fill"):
    try:
        with (run_dir / "filled").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        if job == "fill and exit":
            os._exit(3)
        from experiments.runs.atomic_files import cannot_write

        raise cannot_write(run_dir / "filled", error) from None
