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

if job in ("stand", "miss", "compute", "watchdog"):
    from experiments.launching.watching.beats import Waiting, activity, beat_path, read_beat

    activity.begin("step 7")
if job == "watchdog" and rank == 0:
    since = time.monotonic()
    activity.waiting = lambda: Waiting("all_reduce", since, 5)
    while read_beat(beat_path(run_dir, 1)) is None or time.monotonic() - since < 3:  # the launcher sees both wait
        time.sleep(0.1)
    print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
    print("  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)", file=sys.stderr)
    sys.stderr.flush()
    os.abort()
if job == "stand" and rank == 1:
    while (last := read_beat(beat_path(run_dir, rank))) is None or last.activity != "step 7":
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSTOP)
if job in ("stand", "miss") and rank == 0:
    since = time.monotonic()
    activity.waiting = lambda: Waiting("all_reduce", since, 5)
    threading.Event().wait()  # as native code waits: no signal of Python's is handled
if job in ("stand", "miss", "watchdog"):
    miss_the_collective()
if job == "compute":
    time.sleep(8)
if job == "ignore":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        os.kill(os.getpid(), number)
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
if job == "restart" and rank == 1 - int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
    raise ValueError(f"of start {1 - rank}")
if job == "raise" and rank == 1:
    raise ValueError("loss is not finite\nat step 12")
if job == "exit" and rank == 1:
    os._exit(3)
if job == "SIGSEGV" and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
if job in ("raise", "exit", "SIGSEGV", "restart"):
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
