"""Start ``python -m MODULE`` by a fork of this process, which has imported what the module needs.

Starting Python and importing torch takes many times as long as a small training. A forked process has its own
environment, session, signal handlers and files, as a started one has; it does not run what modules do when imported.
"""

import atexit
import ctypes
import gc
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from experiments.config import stopping
from experiments.runs.stop_signals import StopSignals, stop_signals
from tests.soak import points

SPACE, HOST = "MICRO_SOAK_SPACE", "MICRO_SOAK_HOST"  # variables: the network namespace and the name of a host
_NEW_MOUNTS, _NEW_NAMES, _NETWORK = 0x20000, 0x4000000, 0x40000000  # linux/sched.h
_BIND, _SLAVE_ALL = 0x1000, 0x84000  # linux/mount.h


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A subprocess.Popen that forks for ``python -m MODULE``, and starts any other command as usual.

    Standard input, output and error of a forked process are open files, or those of this process.
    """

    def __init__(self, args: Sequence[str], **settings: Any) -> None:
        self._settings = settings
        super().__init__(args, **settings)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        module = _module_of(args)
        if module is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        # A handler that raises in a function that Python calls at a fork would raise nothing.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _be(*module, {**self._settings, "signal_mask": before})
        self._child_created = True
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def preload() -> None:
    """Import what trainings need, without starting a thread, which no fork would have."""
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as ranks
    import torch.distributed.run

    import experiments.launching.elastic
    import experiments.train
    import experiments.training.one_run
    import experiments.training.rank_main  # noqa: F401
    from micro import kernels

    kernels.prepare()
    ranks.Popen = ForkedPopen
    gc.collect()
    gc.freeze()


def _module_of(args: Any) -> tuple[str, list[str]] | None:
    """Return the module and the arguments of ``python -u -m MODULE ARGUMENTS``; None for another command."""
    words = [os.fspath(word) for word in args] if not isinstance(args, str | bytes) else []
    if not words or words[0] != sys.executable:
        return None
    rest = [word for word in words[1:3] if word != "-u"] + words[3:]
    return (rest[1], rest[2:]) if rest[:1] == ["-m"] else None


def _be(module: str, arguments: list[str], settings: Mapping[str, Any]) -> NoReturn:
    """Be the new process: run the module as ``python -m`` does, and end."""
    code = 1
    try:
        atexit._clear()
        _separate(settings)
        sys.argv = [module, *arguments]
        if re.fullmatch(r"experiments\.\w+", module):
            stopping.begin_command()  # as the import of the package does in a new process
        points.install(points.role_of(module))
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # preload has imported it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _separate(settings: Mapping[str, Any]) -> None:
    """Leave the parent's session, its handlers of signals and what they recorded, its files, folder and environment."""
    if settings.get("start_new_session"):
        os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    vars(stop_signals).update(vars(StopSignals()))
    signal.pthread_sigmask(signal.SIG_SETMASK, settings["signal_mask"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if settings.get(name) is not None:
            os.dup2(settings[name].fileno(), number)
    _close_others()
    os.chdir(settings.get("cwd") or ".")
    if settings.get("env") is not None:
        os.environ.clear()
        os.environ.update(settings["env"])
    if space := os.environ.pop(SPACE, None):
        _enter(space, os.environ[HOST])


def _close_others() -> None:
    """Close the parent's files, but keep their numbers: objects of the parent that are collected here close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != nothing:
            with suppress(OSError):  # that of the listing itself
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)


def _enter(space: str, host: str) -> None:
    """Enter a network namespace as ``ip netns exec`` does, with its table of hosts and a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    hosts = f"/etc/netns/{space}/hosts".encode()
    with Path("/run/netns", space).open("rb") as place:
        done = [
            libc.setns(place.fileno(), _NETWORK),
            libc.unshare(_NEW_MOUNTS | _NEW_NAMES),
            libc.mount(b"none", b"/", None, _SLAVE_ALL, None),
            libc.mount(hosts, b"/etc/hosts", None, _BIND, None),
            libc.sethostname(host.encode(), len(host)),
        ]
    if any(done):
        raise OSError(ctypes.get_errno(), f"cannot enter {space}: {os.strerror(ctypes.get_errno())}")


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """End as the interpreter does: after other threads and exit functions, without the parent's frames."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
