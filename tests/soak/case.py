"""What a seed stands for: a run, and the faults that disturb it."""

import math
import random
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.config.errors import UserError
from experiments.config.paths import ROOT
from experiments.config.stopping import STOP_SIGNALS

KINDS = {"simulated": 30, "local": 18, "started": 1, "torchrun": 3, "hosts": 6}  # with their shares of the cases
FAULTS = ("signal", "pause", "freeze", "clock", "full", "removed", "twice", "torn", "cut", "slow", "vanish")
SIGNALS = (
    *(*STOP_SIGNALS, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR2, signal.SIGALRM),  # at which a process ends that expects none
)
_SHARES = {
    "signal": 12,
    "pause": 3,
    "freeze": 1,
    "clock": 2,
    "full": 3,
    "removed": 1,
    "twice": 2,
    "torn": 3,
    "cut": 6,
    "slow": 6,
    "vanish": 3,
}
_TORN_AT_END = 0.15  # share of the cases in which a file of the finished run is torn
_OF_HOSTS = ("cut", "slow", "vanish")
_OF_PROCESSES = ("signal", "pause")  # possible where processes tell no points
TIME = "time"  # the point of a started process: it is reached after so many tenths of a second
ANY = "any"  # the target among started processes: the one in place of a share of them
_POINT_SHARES = {"start": 1, "disk": 4, "row": 3, "collective": 4, "step": 2, "save": 3}
_MODELS = {
    "mlp": ["model=mlp", "model.settings.hidden=16", "dataset=synthetic", "dataset.settings.num_samples={samples}"],
    "resnet": ["model=resnet8", "dataset=synthetic", "dataset.settings.num_samples={samples}"],
    "lstm": [
        *("model=lstm_small", "model.settings.hidden=16", "dataset=manuals", "dataset.settings.max_words=200"),
        *("dataset.settings.num_train={words}", "dataset.settings.num_test=200"),
    ],
}
_BATCH = 4
_SEQUENCE = 33  # words of the manuals that a sample takes


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run at a moment of one of its processes.

    Args:
        kind: One of FAULTS.
        role: The process that stands still meanwhile: command, agent, or rank0, rank1 and so on.
        point, number: It comes when that process reaches this point for the n-th time; see points.py.
        target: The process that a signal or a pause strikes, or the host whose link is cut or slow.
        signal: Number of the signal.
        seconds: Of a pause, of a cut or slow link (infinite for a host that vanishes); how far the clock jumps.
        place: Shares in [0, 1): which file is torn, and where in it; which process is the target, if it is ANY.
        flip: Whether a torn file has a changed byte, and no end that is missing.
    """

    kind: str
    role: str = "command"
    point: str = "start"
    number: int = 1
    target: str = "command"
    signal: int = 0
    seconds: float = 0.0
    place: tuple[float, float] = (0.0, 0.0)
    flip: bool = False

    def __str__(self) -> str:
        where = f"at {self.point} {self.number} of {self.role}"
        if self.kind == "signal":
            return f"{signal.Signals(self.signal).name} to {self.target} {where}"
        if self.kind == "torn":
            return f"torn file ({'byte' if self.flip else 'end'}, {self.place[0]:.3f}, {self.place[1]:.3f})"
        lasting = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind} {self.target}{lasting} {where}"


@dataclass(frozen=True)
class Setup:
    """A run to disturb.

    Args:
        kind: One of KINDS.
        method: Name of its sparsifier.
        words: Its command line, without the output folder and where the nodes meet.
        num_ranks: Of the run; on hosts and under torchrun too.
    """

    kind: str
    method: str
    words: tuple[str, ...]
    num_ranks: int


@dataclass(frozen=True)
class Plan:
    """The faults of a case.

    Args:
        attempts: For each of the first attempts, the faults while it runs.
        between: For each of these attempts, the files that are torn after it.
        after: The files that are torn when the run has ended.
    """

    attempts: Sequence[Sequence[Fault]]
    between: Sequence[Sequence[Fault]] = field(default=())
    after: Sequence[Fault] = field(default=())


def methods() -> list[str]:
    """Return the names of all sparsifiers in conf/."""
    return sorted(path.stem for path in (ROOT / "conf/sparsifier").glob("*.yaml"))


def draw_setup(seed: int, kinds: Collection[str], allowed: Sequence[str]) -> Setup:
    """Return the run of a seed: consecutive seeds take the methods in turn.

    Args:
        kinds: Of runs.
        allowed: Names of methods.
    """
    from experiments.training.preflight import prepare_runs

    draw = random.Random(f"setup {seed}")
    method = allowed[seed % len(allowed)]
    kind = draw.choices([*kinds], [KINDS[each] for each in kinds])[0]
    for _ in range(100):  # parts that do not fit each other are drawn again
        setup = _any_setup(draw, kind, method)
        try:
            prepare_runs([[*setup.words, *_as_local(setup)]])
        except UserError:
            continue
        return setup
    raise AssertionError(f"no run of {method} was accepted")


def draw_plan(seed: int, kinds: Collection[str], counts: Mapping[str, Mapping[str, int]], setup: Setup) -> Plan:
    """Return the faults of a seed.

    Args:
        kinds: Of faults.
        counts: How often each process reaches each point in the undisturbed run, by role.
    """
    draw = random.Random(f"faults {seed}")
    usual = [kind for kind in kinds if _is_possible(kind, setup)]
    attempts, between = [], []
    for _ in range(draw.choice((1, 1, 2, 2, 3))):
        drawn = [_any_fault(draw, usual, counts, setup) for _ in range(draw.choice((1, 1, 1, 2)))]
        attempts.append([fault for fault in drawn if fault.kind != "torn"])
        between.append([fault for fault in drawn if fault.kind == "torn"])
        if not attempts[-1]:  # a file is torn in a run that is not finished
            attempts[-1].append(_any_fault(draw, ["signal"], counts, setup))
    after = [_any_fault(draw, ["torn"], counts, setup)] if "torn" in kinds and draw.random() < _TORN_AT_END else []
    return Plan(attempts, between, after)


def _is_possible(kind: str, setup: Setup) -> bool:
    if kind in _OF_HOSTS:
        return setup.kind == "hosts"
    if kind == "freeze":  # a frozen command can be ended by nobody but its user
        return setup.kind not in ("simulated", "started")
    return setup.kind != "started" or kind in (*_OF_PROCESSES, "torn")


def _any_setup(draw: random.Random, kind: str, method: str) -> Setup:
    num_ranks = draw.choice({"simulated": (1, 2, 3, 4), "hosts": (2,)}.get(kind, (2, 2, 2, 3)))
    accumulate = draw.choice((1, 1, 1, 2))
    samples = draw.randint(3, 7) * _BATCH * num_ranks * accumulate
    fill = {"samples": samples, "words": samples * _SEQUENCE}
    model = draw.choices([*_MODELS], [6, 1, 2])[0]
    words = [word.format(**fill) for word in _MODELS[model]]
    words += [
        f"sparsifier={method}",
        f"batch_size={_BATCH}",
        f"accumulate={accumulate}",
        f"epochs={draw.randint(1, 3)}",
    ]
    words += [f"density={draw.choice((0.01, 0.05, 0.3))}", f"seed={draw.randrange(1000)}"]
    words += [f"checkpoint.every_steps={draw.randint(1, 6)}", f"checkpoint.keep={draw.randint(1, 3)}"]
    words += _seldom(draw, 0.15, ["density_warmup.steps=5"], ["scope=tensor"], ["scope=model"], ["precision=bfloat16"])
    words += _seldom(draw, 0.1, ["save_weights=true"], ["measure_residual_every=3"], ["optimizer=adam"])
    words += _seldom(draw, 0.1, ["optimizer.clip=1.0"], ["optimizer.lr_at=gradient"], ["nonfinite=skip"])
    if "optimizer=adam" not in words:
        words += _seldom(draw, 0.3, ["optimizer.momentum=0"])
    if kind != "simulated":
        words += _seldom(draw, 0.2, ["schedule=layerwise"], ["schedule=single"])
    if kind == "local":
        words += _seldom(draw, 0.2, ["cluster.max_restarts=1"])
    return Setup(kind, method, tuple(words), num_ranks)


def _seldom(draw: random.Random, share: float, *choices: list[str]) -> list[str]:
    return [word for choice in choices if draw.random() < share for word in choice]


def _as_local(setup: Setup) -> list[str]:
    """Return the words that have this run on one machine, to check it."""
    if setup.kind == "simulated":
        return ["cluster=simulated", f"cluster.world_size={setup.num_ranks}"]
    return [f"cluster.nproc_per_node={setup.num_ranks}"]


def _any_fault(
    draw: random.Random, kinds: Sequence[str], counts: Mapping[str, Mapping[str, int]], setup: Setup
) -> Fault:
    kind = draw.choices(kinds, [_SHARES[each] for each in kinds])[0]
    if kind == "torn":
        return Fault("torn", place=(draw.random(), draw.random()), flip=draw.random() < 0.5)
    role = draw.choice(sorted(counts))
    possible = [point for point, number in counts[role].items() if number]
    point = draw.choices(possible, [_POINT_SHARES.get(each, 1) for each in possible])[0]
    at = {"role": role, "point": point, "number": 1 + int(draw.random() * counts[role][point])}
    target = ANY if setup.kind == "started" else draw.choice(sorted(counts))
    if kind == "signal":
        return Fault(kind, **at, target=target, signal=int(draw.choice(SIGNALS)), place=(draw.random(), 0.0))
    if kind == "pause":
        return Fault(kind, **at, target=target, seconds=draw.choice((0.05, 0.5, 2.0)), place=(draw.random(), 0.0))
    if kind == "freeze":
        return Fault(kind, **at, target=draw.choice([role for role in sorted(counts) if role.startswith("rank")]))
    if kind == "clock":
        return Fault(kind, **at, seconds=draw.choice((-86400.0, -3600.0, -2.0, 2.0, 3600.0, 864000.0)))
    if kind in _OF_HOSTS:
        host = str(draw.randrange(setup.num_ranks))
        seconds = draw.choice((0.2, 1.0, 4.0)) if kind != "vanish" else math.inf
        return Fault(kind, **at, target=host, seconds=seconds)
    return Fault(kind, **at)
