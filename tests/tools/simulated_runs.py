"""Small trainings in this process: their configuration, and a run that can be stopped before a step."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from experiments.config.identity import run_name
from experiments.config.schema import TrainConfig
from experiments.config.stopping import stop_signals
from experiments.runs.rank_files import weights_digest
from experiments.runs.records import last_row
from experiments.runs.run_folder import RunFolder
from experiments.training.loop import Trainer
from experiments.training.preflight import prepare_runs
from experiments.training.simulated_workers import SimulatedWorkers
from experiments.training.tasks import load_task
from experiments.training.workers import kind_of_workers

CPU = torch.device("cpu")
IMAGES = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=128", "batch_size=8", "epochs=2"]


def configured(output: Path, *words: str, world_size: int = 3) -> TrainConfig:
    common = ["cluster=simulated", f"cluster.world_size={world_size}", f"output={output}", "density=0.05"]
    (config,) = prepare_runs([[*common, *words]])
    return config


class Run:
    """A training in this process, stopped before a step where one is named.

    Args:
        at: what to do when so many steps are done.
        watch: called with each rank and its gradient, before they are reduced.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        stop: int | None = None,
        at: Mapping[int, Callable[[], object]] | None = None,
        watch: Callable[[int, torch.Tensor], object] = lambda rank, gradient: None,
    ) -> None:
        self._at = at or {}
        self.folder = RunFolder(Path(config.output) / run_name(config))
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.folder.config_path.touch()
        self.folder.manifest_path.touch()
        workers = kind_of_workers(config)(config, load_task(config, CPU))
        if isinstance(workers, SimulatedWorkers):
            workers.watch, self.layout = watch, workers.layout
        try:
            self.trainer = Trainer(config, workers, self.folder)
            self.began_at = self.trainer.position.step
            self.row = self._until(stop)
            self.digest = weights_digest(workers.task.model.state_dict())
            self.states = workers.states()
            self.trainer.close()
        finally:
            stop_signals.number = 0
            workers.close()

    def _until(self, stop: int | None) -> dict[str, object] | None:
        step = self.trainer.step

        def watched(epoch: int, index: int) -> float:
            loss = step(epoch, index)
            self._at.get(self.trainer.position.step, int)()
            if self.trainer.position.step == stop:
                stop_signals.number = signal.SIGUSR1
            return loss

        self.trainer.step = watched  # type: ignore[method-assign]
        return last_row(self.folder.epochs_path) if self.trainer.run() else None


@contextmanager
def struck(step: int, strike: Callable[[], object]) -> Iterator[None]:
    """Call ``strike`` before a step of the trainings in this context."""
    take = Trainer.step

    def taken(trainer: Trainer, epoch: int, index: int) -> float:
        if trainer.position.step == step:
            strike()
        return take(trainer, epoch, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", taken)
        yield
