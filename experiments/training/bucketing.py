"""Turn the configured schedule into DDP's buckets: rank 0 makes the plan, and every rank checks it on its model."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from experiments.config.builders import build_reducer, build_schedule
from experiments.config.errors import UserError, as_user_error
from experiments.config.method_names import method_of
from experiments.config.schema import TrainConfig
from experiments.planning.schedules.base import Plan
from experiments.planning.schedules.by_size import Ddp, Single
from micro.comm.objects import gather_objects
from micro.comm.ranks import Comm


def make_plan(config: TrainConfig, model: nn.Module) -> Plan | None:
    """Return the plan that the configured schedule makes from its files, or None where it needs no files.

    Raises:
        UserError: a file is missing or damaged, or was measured for another model or number of workers.
    """
    schedule = build_schedule(config)
    if schedule is None or not schedule.is_planned:
        return None
    from experiments.planning.problem import problem_of
    from experiments.planning.tables import LinkTable, SelectTable  # few runs have a planned schedule
    from experiments.planning.traces import Trace

    files = config.schedule
    with as_user_error():
        assert files.trace is not None
        assert files.link is not None
        trace, link = Trace.load(Path(files.trace)), LinkTable.load(Path(files.link))
        select = SelectTable.load(Path(files.select)) if files.select else None
        if link.world_size != config.world_size:
            raise ValueError(
                f"{files.link} was measured with {link.world_size} workers, the run has {config.world_size}: "
                "measure the link with the same number"
            )
        own_s = partial(select.seconds, method_of(config).split("+")[0]) if select else None
        problem = problem_of(trace, link, build_reducer(config), select=own_s)
        plan = schedule.plan(problem)
        plan.check_model(gradient_bytes(model))
        return plan


def agreed_plan(config: TrainConfig, model: nn.Module, comm: Comm) -> Plan | None:
    """Return rank 0's plan on all ranks; each has checked that it fits its own model.

    Raises:
        UserError: on all ranks: there is no plan, or it does not fit the model of a rank.
    """
    plan = gather_objects(_or_mistake(partial(make_plan, config, model)) if comm.rank == 0 else None)[0]
    if isinstance(plan, UserError):
        raise plan
    assert plan is None or isinstance(plan, Plan)
    problem = _or_mistake(partial(plan.check_model, gradient_bytes(model))) if plan else None
    for rank, answer in enumerate(gather_objects(problem)):
        if answer:
            raise UserError(f"rank {rank}: {answer}")
    return plan


def _or_mistake(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns, or the UserError of its ValueError."""
    try:
        with as_user_error():
            return work()
    except UserError as mistake:
        return mistake


def bucket_caps(config: TrainConfig, model: nn.Module, plan: Plan | None) -> dict[str, Any]:
    """Return the arguments of DDP that set the buckets of the configured schedule."""
    if plan:
        return {"bucket_cap_mb_list": list(plan.bucket_caps_mb)}
    schedule = build_schedule(config) or (Ddp() if config.sparsifier.is_dense else Single())
    return {"bucket_cap_mb": schedule.bucket_cap_mb(sum(gradient_bytes(model).values()) / 2**20)}


def check_buckets(plan: Plan, buckets: Sequence[tuple[str, ...]]) -> None:
    """Raise UserError unless DDP made the planned buckets; the order of parameters within a bucket does not matter."""
    for number, (planned, made) in enumerate(zip(plan.groups, buckets, strict=False)):
        if set(planned) != set(made):
            odd = next(iter(set(made) ^ set(planned)))
            raise UserError(
                f"backward does not follow the plan: bucket {number} differs by '{odd}', whose gradient is ready at "
                "another time than in the trace; profile this model again"
            )
    if len(plan.groups) != len(buckets):
        raise UserError(f"the plan has {len(plan.groups)} buckets, DDP made {len(buckets)}: profile this model again")


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each trainable parameter's gradient."""
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters() if p.requires_grad}
