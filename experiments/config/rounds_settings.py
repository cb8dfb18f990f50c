"""Settings of local steps: how many each worker takes by itself before differences of weights are exchanged."""

from dataclasses import dataclass
from typing import Any

from experiments.config.errors import UserError, check_choice
from experiments.config.ranges import check_count

BUFFERS = ("mean", "first", "own")
LOST_WORKERS = ("stop", "go_on")


@dataclass(kw_only=True)
class RoundsConfig:
    """Rounds of local steps; see micro.LocalSteps.

    Attributes:
        every: steps of each worker's own optimizer between two exchanges of weights; 0: gradients are exchanged at
            every step.
        lr: of the outer optimizer, which takes the mean difference of weights for a gradient.
        momentum: of the outer optimizer.
        nesterov: whether the outer momentum is Nesterov's, as in DiLoCo.
        buffers: of the model at the end of a round. mean: averaged; first: those of the first worker; own: each keeps
            its.
        momentum_with_feedback: allow outer momentum beside a residual, which both add up what was not applied at once.
        fragments: of the model, each exchanged at a step of its own: a number, or a list of patterns of names for each.
        delay: steps that an exchange goes on beside training.
        mix: share of the new global weights in a worker's after an exchange; the rest stays as it is.
        lost_workers: what becomes of the run when torchrun forms a new group with other ranks than before. stop: it
            ends; go_on: the ranks that are there go on from the last round that ended. Every round is then saved, in
            place of what checkpoint.every_s says; cluster.world_size says how many ranks there are at the most.
    """

    every: int = 0
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    buffers: str = "mean"
    momentum_with_feedback: bool = False
    fragments: Any = 1
    delay: int = 0
    mix: float = 1.0
    lost_workers: str = "stop"


def check_rounds(config: Any) -> None:
    """Raise UserError for settings of rounds, of a TrainConfig, that are out of range or contradict others."""
    rounds = config.rounds
    check_count("rounds.every", rounds.every, 0)
    check_choice("rounds.buffers", BUFFERS, rounds.buffers)
    check_choice("rounds.lost_workers", LOST_WORKERS, rounds.lost_workers)
    if not 0 < rounds.lr < float("inf"):
        raise UserError(f"rounds.lr must be positive, got {rounds.lr}: with 0 no weight would move")
    if not 0 <= rounds.momentum < 1:
        raise UserError(f"rounds.momentum must be in [0, 1), got {rounds.momentum}")
    if rounds.nesterov and not rounds.momentum:
        raise UserError("rounds.nesterov needs a momentum above 0, got 0")
    if not rounds.every:
        _refuse_without_rounds(rounds)
        return
    if config.resize != "refuse":
        raise UserError(
            f"resize={config.resize} does not go with rounds.every, workers have weights of their own: leave it out"
        )
    for key, usual, why in (
        ("optimizer.lr_at", "update", "differences of weights have the learning rate in them"),
        ("optimizer.momentum_at", "update", "each worker's own optimizer has the momentum"),
        ("optimizer.clip_at", "gradient", "each worker clips its own gradients"),
        ("optimizer.clip_norm", "rank", "workers know nothing of each other's gradients"),
        ("schedule.name", "auto", "one vector is exchanged at the end of a round"),
    ):
        group, name = key.split(".")
        given = getattr(getattr(config, group), name)
        if given != usual and (key != "optimizer.clip_at" or config.optimizer.clip is not None):
            shown = key.removesuffix(".name")
            raise UserError(f"{shown}={given} does not go with rounds.every, {why}: leave it out")
    if rounds.lost_workers == "go_on":
        _check_go_on(config)


def _check_go_on(config: Any) -> None:
    """Raise UserError for settings with which a run cannot go on without a worker."""
    if config.cluster.simulated:
        raise UserError("rounds.lost_workers=go_on is for real workers, none of simulated ones is lost: leave it out")
    for key, usual in (("fragments", 1), ("delay", 0), ("mix", 1.0)):
        if getattr(config.rounds, key) != usual:
            raise UserError(
                f"rounds.{key}={getattr(config.rounds, key)} does not go with rounds.lost_workers=go_on, weights are "
                "at no time equal on all ranks: leave one of them out"
            )
    if config.checkpoint.every_steps:
        raise UserError(
            f"checkpoint.every_steps={config.checkpoint.every_steps} does not go with rounds.lost_workers=go_on, which "
            "saves at the end of every round: leave it out"
        )


def _refuse_without_rounds(rounds: RoundsConfig) -> None:
    for key, default in vars(RoundsConfig()).items():
        if getattr(rounds, key) != default:
            raise UserError(f"rounds.{key}={getattr(rounds, key)} needs rounds: set rounds.every, or leave it out")
