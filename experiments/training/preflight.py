"""Check runs before a worker starts: their parts, data, model, devices and the checkpoint that they start from."""

import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import data
from experiments.config.builders import build_model, build_reducer, check_parts
from experiments.config.checks import gpus_of_job
from experiments.config.compose import compose_runs
from experiments.config.errors import UserError, as_user_error, one_line
from experiments.config.keys import from_yaml
from experiments.config.ranges import host_and_port
from experiments.config.schema import IN_JOB, LAUNCH, ClusterConfig, TrainConfig
from experiments.launching.rank_environment import is_rank, read_rank_environment
from experiments.runs.checkpoints import open_checkpoint
from experiments.runs.manifest import other_data
from experiments.runs.rank_files import check_world_size
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.training.bucketing import make_plan
from experiments.training.extending import end_to_extend
from experiments.training.tasks import check_task, steps_per_epoch
from micro.local.splitting import check_streaming, split


def prepare_runs(jobs: Iterable[list[str]], *, joined_world_size: int | None = None) -> list[TrainConfig]:
    """Return the configurations of all jobs, checked. Raises: UserError, for the first wrong one."""
    configs = compose_runs(jobs, joined_world_size=joined_world_size)
    check_runs(configs)
    return configs


def check_runs(configs: Iterable[TrainConfig]) -> None:
    """Check each run; content that several runs share is checked once. Raises: UserError."""
    configs = list(configs)
    distinct: dict[str, TrainConfig] = {}
    for config in configs:
        check_parts(config)
        check_start(config)
        distinct.setdefault(str(dataclasses.replace(config, seed=0, lr=1.0)), config)
    for config in distinct.values():
        _check_content(config)
        _check_devices(config)
        if config.tracking.name != "none":
            from experiments.tracking.wandb_mirror import check_wandb

            check_wandb(config.tracking)
        _check_start_from(config)
    _check_same_data(configs)


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


def _check_content(config: TrainConfig) -> None:
    """Check that data and model are there and fit each other, and the plan and the rounds with them."""
    dataset, rounds = config.dataset, config.rounds
    with as_user_error():
        data.check(dataset.name, dataset.root, **dataset.settings)
        info = data.info(dataset.name, dataset.root, **dataset.settings)
        check_task(config, info)
        model = shapes_of(config, info.sizes)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        build_reducer(config).check_parameters({name: tuple(p.shape) for name, p in trained.items()})
    longest, length = getattr(model, "max_length", None), dataset.sequence_length
    if longest is not None and length is not None and length > longest:
        raise UserError(
            f"dataset.sequence_length must be at most {longest}, max_length of model {config.model.name}, got {length}"
        )
    if config.batch_size == 1 and info.kind == "images":
        _check_one_image(config, model, info.sizes)
    for note in info.notes:
        _note(f"dataset {dataset.name} of {dataset.root} {note}")
    make_plan(config, model)
    num_steps = steps_per_epoch(config, info)
    if num_steps == 0:
        raise UserError(
            f"world_size {config.world_size} x batch_size {config.batch_size} x accumulate {config.accumulate} is more "
            f"than an epoch of dataset {dataset.name} has ({info.num_train}): lower one of them"
        )
    if not rounds.every:
        return
    with as_user_error(before="rounds."):
        check_streaming(rounds.fragments, rounds.delay, rounds.mix, rounds.every)
        split(trained, rounds.fragments)
    if rounds.every > config.epochs * num_steps:
        raise UserError(
            f"rounds.every is {rounds.every}, the run has {config.epochs * num_steps} steps: lower it, or train longer"
        )


def _check_one_image(config: TrainConfig, model: torch.nn.Module, sizes: dict[str, int]) -> None:
    """Check that batch norm can take single images: it cannot where a layer has one value per channel of each."""
    side = sizes["image_size"]
    try:
        with torch.no_grad():  # with any values: on the meta device this would import torch's compiler
            model.to_empty(device="cpu")(torch.zeros(1, sizes["in_channels"], side, side))
    except ValueError as error:
        raise UserError(
            f"batch_size must be at least 2 for model {config.model.name} and images of {side} pixels, got 1: {error}"
        ) from None


@cache  # once, however many runs read the same data
def _note(line: str) -> None:
    ranks = read_rank_environment()
    if ranks is None or ranks.rank == 0:
        print(f"note: {line}", file=sys.stderr)


def _check_devices(config: TrainConfig) -> None:
    is_queued = gpus_of_job(config.cluster) and not os.environ.get(LAUNCH)
    if is_queued or config.cluster.rdzv_endpoint == IN_JOB or is_rank():
        return  # the job runs on other machines, where this is checked again; ranks compare what each of them sees
    if not config.cluster.simulated:
        _check_cluster(config.cluster)
    devices = torch.cuda.device_count()
    needed = 1 if config.cluster.simulated else config.cluster.nproc_per_node
    if config.cluster.device == "cuda" and devices < needed:
        raise UserError(f"cluster.device=cuda needs {needed} GPUs here, there are {devices}")


def _check_cluster(cluster: ClusterConfig) -> None:
    """Check where the nodes of a run meet. Raises: UserError: it is no address, or its host is unknown here."""
    key = "cluster.rdzv_endpoint"
    host, port = host_and_port(cluster.rdzv_endpoint, key=key, nnodes=cluster.nnodes)
    if cluster.nnodes == 1:
        return
    try:
        socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise UserError(
            f"{key}={host}:{port}: the host is not known here ({why}); name a host or its address"
        ) from None


def _check_start_from(config: TrainConfig) -> None:
    """Check that the run of ``start_from`` exists, has the same data, model and method, and is not further."""
    if config.start_from is None:
        return
    checkpoint = open_checkpoint(Path(config.start_from))
    check_world_size(config, checkpoint)
    before = from_yaml(checkpoint.path.parent.parent / "config.yaml")
    for key in ("model", "sparsifier", "optimizer"):
        if getattr(before, key) != getattr(config, key):
            raise UserError(f"start_from={config.start_from} has another {key}: choose the same, or leave it out")
    if bool(before.rounds.every) != bool(config.rounds.every):
        trained = f"start_from={config.start_from} was trained with rounds.every={before.rounds.every}"
        raise UserError(f"{trained}, got {config.rounds.every}: use the same value")
    if before.dataset.name != config.dataset.name:
        raise UserError(f"start_from={config.start_from} was trained on {before.dataset.name}: choose the same dataset")
    if checkpoint.epoch >= config.epochs:
        done = f"start_from={config.start_from} has done {checkpoint.epoch} epochs"
        raise UserError(f"{done}, epochs is {config.epochs}: raise it")


def _check_same_data(configs: Iterable[TrainConfig]) -> None:
    """Check that runs which have begun, and those of ``start_from``, were trained on the data that is there now."""
    known: dict[str, dict[str, str]] = {}
    for config in configs:
        started = {folder_of(config): "another output"}
        if config.start_from:
            started[RunFolder(Path(config.start_from))] = "leave start_from out"
        if end := end_to_extend(config):
            started[RunFolder(end.path.parent.parent)] = "leave resume=extend out"
        for folder, remedy in started.items():
            if not folder.path.exists():
                continue
            key = str(config.dataset)
            if key not in known:
                known[key] = data.sums(config.dataset.name, config.dataset.root, **config.dataset.settings)
            if changed := other_data(folder, known[key]):
                raise UserError(
                    f"{folder.path} was trained on other data than dataset.root={config.dataset.root} has ({changed}): "
                    f"name the folder of that data, or {remedy}"
                )
