"""What a seed stands for: a run, and the faults that disturb it."""

import random
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from experiments.config.conf_files import choices_of
from experiments.config.errors import UserError
from experiments.config.stopping import STOP_SIGNALS
from experiments.training.preflight import prepare_runs

KINDS = {"simulated": 6, "local": 4, "torchrun": 1}  # with their shares of the cases
FAULTS = {"signal": 12, "pause": 2, "freeze": 1, "full": 2, "removed": 1, "twice": 2, "torn": 4}
SIGNALS = (
    *(*STOP_SIGNALS, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR2),  # at which a process ends that expects none
)
LONGEST_DELAY_S = 0.4
START_S = 6.0  # in which a run starts, about
TIMEOUT_S = 60  # of collectives: a frozen rank ends a run after it
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
    """Something that happens to a run.

    Attributes:
        kind: one of FAULTS.
        step: it comes when so many steps are recorded; 0: at any time from the start.
        delay_s: seconds after that.
        place: shares in [0, 1): which process is struck, or which file is torn and where in it.
        signal: number of the signal.
    """

    kind: str
    step: int
    delay_s: float
    place: tuple[float, float]
    signal: int

    def __str__(self) -> str:
        what = signal.Signals(self.signal).name if self.kind == "signal" else self.kind
        return f"{what} {self.delay_s:.2f} s after step {self.step}"


@dataclass(frozen=True)
class Setup:
    """A run to disturb; ``words`` are its command line, without the output folder."""

    kind: str
    method: str
    words: tuple[str, ...]
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.kind} {self.num_ranks}, {self.method}"


def methods() -> list[str]:
    """Return the names of all sparsifiers in conf/."""
    return choices_of("sparsifier")


def draw_setup(seed: int, kinds: Sequence[str], allowed: Sequence[str]) -> Setup:
    """Return the run of a seed: consecutive seeds take the methods in turn."""
    draw = random.Random(f"setup {seed}")
    method, kind = allowed[seed % len(allowed)], draw.choices(kinds, [KINDS[each] for each in kinds])[0]
    for _ in range(100):  # parts that do not fit each other are drawn again
        setup = _any_setup(draw, kind, method)
        try:
            prepare_runs([setup.words])
        except UserError:
            continue
        return setup
    raise AssertionError(f"no run of {method} was accepted")


def draw_faults(seed: int, kinds: Collection[str], setup: Setup, num_steps: int) -> list[list[Fault]]:
    """Return the faults of each of the first attempts of a seed."""
    draw = random.Random(f"faults {seed}")
    usual = [kind for kind in kinds if kind != "freeze" or setup.kind == "local"]
    return [
        sorted((_any_fault(draw, usual, num_steps) for _ in range(draw.choice((1, 1, 2)))), key=lambda each: each.step)
        for _ in range(draw.choice((1, 1, 2, 3)))
    ]


def _any_setup(draw: random.Random, kind: str, method: str) -> Setup:
    num_ranks = draw.choice((1, 2, 3, 4) if kind == "simulated" else (2, 2, 3))
    accumulate = draw.choice((1, 1, 1, 2))
    samples = draw.randint(8, 20) * _BATCH * num_ranks * accumulate
    fill = {"samples": samples, "words": samples * _SEQUENCE}
    words = [word.format(**fill) for word in _MODELS[draw.choices([*_MODELS], [6, 1, 2])[0]]]
    words += [f"sparsifier={method}", f"batch_size={_BATCH}", f"accumulate={accumulate}"]
    words += [f"epochs={draw.randint(1, 3)}", f"density={draw.choice((0.01, 0.05, 0.3))}"]
    words += [f"seed={draw.randrange(1000)}", f"checkpoint.every_steps={draw.randint(1, 6)}"]
    words += [f"checkpoint.keep={draw.randint(1, 3)}"]
    words += _seldom(draw, 0.15, "density_warmup.steps=5", "scope=tensor", "scope=model", "precision=bfloat16")
    words += _seldom(draw, 0.1, "save_weights=true", "measure_residual_every=3", "nonfinite=skip")
    words += _seldom(draw, 0.1, "optimizer.clip=1.0", "optimizer.lr_at=gradient")
    if kind == "simulated":
        words += ["cluster=simulated", f"cluster.world_size={num_ranks}"]
    else:
        words += [f"cluster.nproc_per_node={num_ranks}", f"cluster.timeout_s={TIMEOUT_S}"]
        words += _seldom(draw, 0.2, "schedule=layerwise", "schedule=single")
    return Setup(kind, method, tuple(words), num_ranks)


def _seldom(draw: random.Random, share: float, *choices: str) -> list[str]:
    return [word for word in choices if draw.random() < share]


def _any_fault(draw: random.Random, kinds: Sequence[str], num_steps: int) -> Fault:
    step = draw.choice((0, *[draw.randrange(1, num_steps + 1)] * 5))
    return Fault(
        kind=draw.choices(kinds, [FAULTS[each] for each in kinds])[0],
        step=step,
        delay_s=draw.random() * (LONGEST_DELAY_S if step else START_S),
        place=(draw.random(), draw.random()),
        signal=int(draw.choice(SIGNALS)),
    )
