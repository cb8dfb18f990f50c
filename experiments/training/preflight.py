"""Check runs before a worker starts: their parts, data, model, devices and the checkpoint that they start from."""

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import data
from experiments.config.builders import build_model, build_reducer, check_parts
from experiments.config.compose import compose_runs
from experiments.config.errors import UserError, one_line
from experiments.config.schema import IN_JOB, LAUNCH, RoundsConfig, TrainConfig, from_yaml
from experiments.launching.elastic import check_cluster
from experiments.launching.rank_environment import is_rank, read_rank_environment
from experiments.runs.checkpoints import open_checkpoint
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.same_data import Checksums, checksums_of, other_data
from experiments.runs.saved_state import check_world_size
from experiments.tracking.wandb_account import check_wandb
from experiments.training.bucketing import make_plan
from experiments.training.tasks import check_task, steps_per_epoch
from micro.local.splitting import check_streaming, split


def prepare_runs(jobs: Iterable[list[str]], *, joined_world_size: int | None = None) -> list[TrainConfig]:
    """Return the configurations of all jobs, checked. Raises: UserError, for the first wrong one."""
    configs = compose_runs(jobs, joined_world_size=joined_world_size)
    check_runs(configs)
    return configs


def check_runs(configs: Iterable[TrainConfig]) -> None:
    """Check each run; content that several runs share is checked once. Raises: UserError."""
    check_num_threads()
    configs = list(configs)
    distinct: dict[str, TrainConfig] = {}
    for config in configs:
        check_parts(config)
        check_start(config)
        distinct.setdefault(_content_key(config), config)
    for config in distinct.values():
        check_content(config)
    check_same_data(configs)


def check_same_data(configs: Iterable[TrainConfig]) -> None:
    """Check that runs which have begun, and those of ``start_from``, were trained on the data that is there now.

    Raises:
        UserError: one was not.
    """
    known: dict[str, Checksums] = {}
    for config in configs:
        started = [RunFolder(Path(config.start_from))] if config.start_from else []
        for folder in filter(lambda each: each.path.exists(), [folder_of(config), *started]):
            key = str(config.dataset)
            if key not in known:
                known[key] = checksums_of(config.dataset)
            if changed := other_data(folder, known[key]):
                where, remedy = config.dataset.root, "leave start_from out" if folder in started else "another output"
                raise UserError(
                    f"{folder.path} was trained on other data than dataset.root={where} has ({changed}): "
                    f"name the folder of that data, or {remedy}"
                )


def check_num_threads() -> None:
    """Check OMP_NUM_THREADS, which torch ignores where it is no number. Raises: UserError."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given and not re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", given.strip()):
        raise UserError(f"OMP_NUM_THREADS must be a whole number of at least 1, got '{given}': change or unset it")


def check_run(config: TrainConfig) -> None:
    """Check one run. Raises: UserError."""
    check_runs([config])


def check_content(config: TrainConfig) -> None:
    """Check the data, model, plan, devices and checkpoint that the workers will use.

    Raises:
        UserError: data is missing or damaged, the model does not fit the data, the plan does not fit the model, or
            there are more workers than batches or devices.
    """
    try:
        data.check(config.dataset.name, config.dataset.root, **config.dataset.settings)
        info = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings)
        check_task(config, info)
        for note in info.notes:
            _note(f"dataset {config.dataset.name} of {config.dataset.root} {note}")
        model = shapes_of(config, info.sizes)
        trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        build_reducer(config).check_parameters(trained)
        if config.rounds.every:
            _check_fragments(config.rounds, model)
    except ValueError as error:
        raise UserError(str(error)) from None
    make_plan(config, model)
    if steps_per_epoch(config, info) == 0:
        raise UserError(
            f"world_size {config.world_size} x batch_size {config.batch_size} x accumulate {config.accumulate} is more "
            f"than an epoch of dataset {config.dataset.name} has ({info.num_train}): lower one of them"
        )
    if config.rounds.every and config.cluster.simulated:
        from experiments.training.round_memory import check_memory  # few runs have local steps

        check_memory(config, sum(p.numel() for p in model.parameters()))
    num_steps = config.epochs * steps_per_epoch(config, info)
    if config.rounds.every > num_steps:
        raise UserError(
            f"rounds.every is {config.rounds.every}, the run has {num_steps} steps: lower it, or train longer"
        )
    _check_devices(config)
    check_wandb(config.tracking)
    _check_start_from(config)


@cache  # once, however many runs read the same data
def _note(line: str) -> None:
    ranks = read_rank_environment()
    if ranks is None or ranks.rank == 0:
        print(f"note: {line}", file=sys.stderr)


def check_start(config: TrainConfig) -> None:
    """Check that torchrun has started this rank, and can start it again, where the run goes on without lost workers."""
    if config.rounds.lost_workers == "stop":
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UserError(
            "rounds.lost_workers=go_on is for ranks that torchrun starts again: start the run with torchrun "
            "--nnodes=MIN:MAX --max-restarts=N, or leave it out"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            "rounds.lost_workers=go_on needs a new store each time that ranks are started: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node"
        )


def _check_fragments(rounds: RoundsConfig, model: torch.nn.Module) -> None:
    try:
        check_streaming(rounds.fragments, rounds.delay, rounds.mix, rounds.every)
        split({name: p for name, p in model.named_parameters() if p.requires_grad}, rounds.fragments)
    except ValueError as error:
        raise ValueError(f"rounds.{error}") from None


def shapes_of(config: TrainConfig, sizes: dict[str, int]) -> torch.nn.Module:
    """Return the model without values. Raises: ValueError: as build_model, or torch has no tensors of these shapes."""
    try:
        with torch.device("meta"), _SkipInitialization():
            return build_model(config, sizes)
    except (RuntimeError, OverflowError, TypeError, ZeroDivisionError) as error:
        settings = {"num_classes": config.model.num_classes, **config.model.settings}
        reason = one_line(str(error).partition("\n")[0] or error)
        raise ValueError(f"model {config.model.name} cannot be built with {settings}: {reason}") from None


class _SkipInitialization(TorchFunctionMode):
    """Do not initialize weights: tensors of the meta device have no values, and torch would import its compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the tensor of an initializer unchanged; call any other function."""
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _content_key(config: TrainConfig) -> str:
    """Return the settings that ``check_content`` may depend on: all but the seed and the learning rate."""
    return str(dataclasses.replace(config, seed=0, lr=1.0))


def _check_devices(config: TrainConfig) -> None:
    is_queued = config.cluster.slurm.gpus_per_node and not os.environ.get(LAUNCH)
    if is_queued or config.cluster.rdzv_endpoint == IN_JOB:
        return  # the job runs on other machines, where this check runs again with the job's own endpoint
    if not config.cluster.simulated and not is_rank():  # else it is not used
        check_cluster(config.cluster)
    devices = torch.cuda.device_count()
    needed = 1 if config.cluster.simulated else config.cluster.nproc_per_node
    if config.cluster.device == "cuda" and devices < needed and not is_rank():  # ranks compare what each of them sees
        raise UserError(f"cluster.device=cuda needs {needed} GPUs here, there are {devices}")
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if config.compile and not devices and not any(shutil.which(name) for name in compilers):
        raise UserError("compile=true needs a C++ compiler on a CPU, there is none: install g++, or leave it out")


def _check_start_from(config: TrainConfig) -> None:
    """Check that the run of ``start_from`` exists and has the same model, method and optimizer."""
    if config.start_from is None:
        return
    checkpoint = open_checkpoint(Path(config.start_from))
    check_world_size(config, checkpoint)
    before = from_yaml(checkpoint.path.parent.parent / "config.yaml")
    for key in ("model", "sparsifier", "optimizer"):
        if getattr(before, key) != getattr(config, key):
            raise UserError(f"start_from={config.start_from} has another {key}: choose the same, or leave it out")
