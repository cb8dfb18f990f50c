"""Go on after workers were lost: the group that forms again takes the weights of the last round that ended."""

import ctypes
import io
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from micro.checkpoints.resizing import without_parts
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, Broadcast
from micro.drivers.meeting import content_of
from micro.local.guard import failing_together
from micro.local.steps import LocalSteps
from micro.reducers.base import Reducer
from micro.reducers.two_level import TwoLevel
from micro.reducers.wrapping import innermost, layers
from micro.values.flat import Layout


@dataclass(frozen=True, slots=True)
class Regrouped:
    """What the ranks of a new group have gone on from, the same on all of them.

    Attributes:
        num_rounds: rounds that had ended.
        world_size, former_world_size: ranks now, and when that round ended.
        newcomers: ranks that had nothing of that round: they begin with its weights, without a residual and with a new
            inner state. The residuals of workers that did not come back are lost.
    """

    num_rounds: int
    world_size: int
    former_world_size: int
    newcomers: tuple[int, ...]


def save_round(local: LocalSteps, path: str | os.PathLike[str]) -> None:
    """Write what this worker needs to go on from the round that has ended, in place of an earlier one.

    Args:
        path: a file of this worker's own, for instance on the disk of its node. It is written beside and then moved.

    Raises:
        ValueError: the reducer keeps what cannot be lost with a worker.
        RuntimeError: weights are not equal on all ranks now, in the middle of a round or while fragments are under way.
    """
    if not local.is_equal:
        raise RuntimeError("a round is saved at its end, when weights are equal on all ranks: call finish() before")
    check_losable(local.reducer)
    draft = Path(f"{os.fspath(path)}.draft")
    inner = [optimizer.state_dict() for optimizer in local.optimizers]
    torch.save({"local": local.state_dict(), "optimizers": inner}, draft)
    os.replace(draft, path)


def check_losable(reducer: Reducer) -> None:
    """Check that a worker may be lost with what a reducer keeps for it.

    Raises:
        ValueError: all ranks keep a sum of it, which would be wrong without the worker, or ranks keep parts of what
            their node sends.
    """
    if any(isinstance(layer, TwoLevel) for layer in layers(reducer)):
        raise ValueError(
            "reducer two_level keeps a share of a node's residual on each of its ranks: a worker cannot be lost; use "
            "the reducer inside it"
        )
    memory = innermost(reducer).start(Layout(("weights",), ((8, 8),)), torch.float32, torch.device("cpu")).memory
    sums = sorted(key for key, vector in memory.items() if vector.numel() and key != "residual")
    if sums:
        raise ValueError(
            f"the reducer keeps {' and '.join(sums)}, of which all ranks keep a sum: a worker cannot be lost; use "
            "feedback residual, or none"
        )


def take_round(local: LocalSteps, path: str | os.PathLike[str]) -> Regrouped | None:
    """Go on from the newest round that a rank of this group has saved; all ranks call this before the first step.

    A rank that has saved that round takes its own residual and inner state. One that has not, or an earlier round, or
    one of a group that went on without the others, takes the weights, the outer optimizer and the buffers of the lowest
    rank that has. Ranks need not have the numbers that they had, nor be as many.

    Args:
        path: the file of ``save_round``; it need not exist.

    Returns:
        what the group has gone on from; None where no rank has saved a round: it begins with the weights that it has.

    Raises:
        ValueError: the file is damaged, or the state does not fit. The other ranks raise an error with these words.
    """
    with failing_together(local.comm):
        return _taken(local, Path(path))


def _taken(local: LocalSteps, path: Path) -> Regrouped | None:
    own = _read(path) if path.exists() else None
    comm, device = local.comm, local.device
    comm.begin_step()
    saved = (-1, 0) if own is None else (own["local"]["num_rounds"], _sum_of_weights(own["local"]))
    rows: list[list[int]] = comm.answer(AllGather(mine=torch.tensor(saved, device=device))).tolist()  # host sync: once
    newest = max(rounds for rounds, _ in rows)
    if newest < 0:
        return None
    source = next(rank for rank, (rounds, _) in enumerate(rows) if rounds == newest)
    newcomers = tuple(rank for rank, row in enumerate(rows) if row != rows[source])
    common = _broadcast(_without_memory(own["local"]) if own and comm.rank == source else None, source, comm, device)
    if own is not None and comm.rank not in newcomers:
        local.load_state_dict(_fitting(own["local"], comm))
        for optimizer, inner in zip(local.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(inner)
    else:
        local.load_state_dict(_fitting(_with_zeros(common), comm))
    local.buffers.restore()
    return Regrouped(newest, comm.world_size, common["world_size"], newcomers)


def regrouped(state: Mapping[str, Any], comm: Comm) -> dict[str, Any]:
    """Return the state of LocalSteps at the end of a round for this rank, of a group of any size, without a message.

    Args:
        state: what this rank saved in its former group or, for a rank that was not in it, what another one saved.

    Raises:
        ValueError: the state was saved in the middle of a round: there are weights of each rank.
    """
    if any(fragment["is_apart"] or fragment["under_way"] for fragment in state["fragments"]):
        raise ValueError(
            f"state was saved at step {state['step']}, in the middle of a round: ranks have weights of their own there"
        )
    return _fitting(state if state["rank"] == comm.rank else _with_zeros(state), comm)


def _read(path: Path) -> dict[str, Any]:
    """Return what ``save_round`` wrote. Raises ValueError where that is damaged."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved["local"]["num_rounds"], saved["optimizers"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} holds no round that can be read ({type(error).__name__}: {reason}): remove it, and this rank "
            "takes the weights of the others"
        ) from error
    return saved


def _sum_of_weights(state: Mapping[str, Any]) -> int:
    """Return a sum that tells the weights of a round from others: two groups may have ended as many rounds."""
    pieces = [piece for bucket in state["buckets"] for piece in bucket["start"].values()]
    return reduce(lambda found, piece: zlib.crc32(content_of(piece), found), pieces, 0)


def _without_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    buckets = [{**bucket, "memory": {key: {} for key in bucket["memory"]}} for bucket in state["buckets"]]
    return {**state, "buckets": buckets}


def _with_zeros(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state that has zeros for what is kept of each parameter."""
    buckets = []
    for bucket in state["buckets"]:
        zeros = {name: torch.zeros_like(piece) for name, piece in bucket["start"].items()}
        buckets.append({**bucket, "memory": dict.fromkeys(bucket["memory"], zeros)})
    return {**state, "buckets": buckets}


def _fitting(state: Mapping[str, Any], comm: Comm) -> dict[str, Any]:
    """Return a state as of this rank; where there are more or fewer of them, the states of parts start from nothing."""
    buckets = state["buckets"]
    if state["world_size"] != comm.world_size:
        buckets = [without_parts(bucket) for bucket in buckets]
    return {**state, "rank": comm.rank, "world_size": comm.world_size, "buckets": buckets}


def _broadcast(state: dict[str, Any] | None, source: int, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Return the state of rank ``source`` on all ranks."""
    written = io.BytesIO()
    if state is not None:
        torch.save(state, written)
    content = bytearray(written.getvalue())
    length = int(comm.answer(AllGather(mine=torch.tensor([len(content)], device=device))).max())  # host sync: once
    sent = torch.zeros(length, dtype=torch.uint8, device=device)
    if content:
        sent.copy_(torch.frombuffer(content, dtype=torch.uint8))
    received = comm.answer(Broadcast(mine=sent, source=source)).cpu()
    read = io.BytesIO(ctypes.string_at(received.data_ptr(), length))
    found: dict[str, Any] = torch.load(read, map_location="cpu", weights_only=True)
    return found
