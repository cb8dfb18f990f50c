"""Recover local steps after losing workers: the new group continues from the weights of the last finished round."""

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
    """The round that a new group continues from, equal on all ranks.

    Attributes:
        num_rounds: number of finished rounds.
        world_size, former_world_size: ranks now, and at the end of that round.
        newcomers: ranks without a state of that round: they start from its weights, without a residual and with a new
            inner state. Residuals of workers that did not return are lost.
    """

    num_rounds: int
    world_size: int
    former_world_size: int
    newcomers: tuple[int, ...]


def save_round(local: LocalSteps, path: str | os.PathLike[str]) -> None:
    """Save this worker's state at the end of a round, replacing an earlier one.

    Args:
        path: a file for this worker only, for instance on its node's disk. It is replaced atomically.

    Raises:
        ValueError: the reducer's state does not permit losing a worker.
        RuntimeError: weights differ between ranks now: in the middle of a round, or while fragments are exchanged.
    """
    if not local.is_equal:
        raise RuntimeError(
            "a round can be saved only at its end, when all ranks have equal weights: call finish() before"
        )
    check_losable(local.reducer)
    draft = Path(f"{os.fspath(path)}.draft")
    inner = [optimizer.state_dict() for optimizer in local.optimizers]
    torch.save({"local": local.state_dict(), "optimizers": inner}, draft)
    os.replace(draft, path)


def check_losable(reducer: Reducer) -> None:
    """Check that training can continue without a worker's part of the reducer's state.

    Raises:
        ValueError: all ranks keep a sum over ranks, which would be wrong without the worker; or ranks keep shares of
            their node's residual.
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
    """Load the newest round that any rank of this group saved; call it on all ranks before the first step.

    A rank that saved that round loads its own residual and inner state. Any other rank (nothing saved, an earlier
    round, or a round of a group that split off) gets weights, outer optimizer and buffers from the lowest rank that
    saved it. The number of ranks and their numbering may change.

    Args:
        path: the file of ``save_round``; it need not exist.

    Returns:
        the round; None if no rank saved one, and training starts from the current weights.

    Raises:
        ValueError: the file is damaged, or the state does not fit. The other ranks raise an error with this message.
    """
    with failing_together(local.comm):
        return _take_newest(local, Path(path))


def _take_newest(local: LocalSteps, path: Path) -> Regrouped | None:
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
    """Adapt a state of LocalSteps from the end of a round to this rank and a group of any size; sends nothing.

    Args:
        state: what this rank saved in its former group; for a new rank, what another one saved.

    Raises:
        ValueError: the state was saved in the middle of a round, where weights differ between ranks.
    """
    if any(fragment["is_apart"] or fragment["under_way"] for fragment in state["fragments"]):
        raise ValueError(
            f"state was saved at step {state['step']}, in the middle of a round, where weights differ between ranks"
        )
    return _fitting(state if state["rank"] == comm.rank else _with_zeros(state), comm)


def _read(path: Path) -> dict[str, Any]:
    """Return what ``save_round`` wrote. Raises ValueError if the file is damaged."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved["local"]["num_rounds"], saved["optimizers"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} holds no readable round ({type(error).__name__}: {reason}): remove it, and this rank takes "
            "the weights of the others"
        ) from error
    return saved


def _sum_of_weights(state: Mapping[str, Any]) -> int:
    """Return a checksum of a round's weights: two groups may have finished equally many rounds."""
    pieces = [piece for bucket in state["buckets"] for piece in bucket["start"].values()]
    return reduce(lambda found, piece: zlib.crc32(content_of(piece), found), pieces, 0)


def _without_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    buckets = [{**bucket, "memory": {key: {} for key in bucket["memory"]}} for bucket in state["buckets"]]
    return {**state, "buckets": buckets}


def _with_zeros(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with zero residuals and momenta."""
    buckets = []
    for bucket in state["buckets"]:
        zeros = {name: torch.zeros_like(piece) for name, piece in bucket["start"].items()}
        buckets.append({**bucket, "memory": dict.fromkeys(bucket["memory"], zeros)})
    return {**state, "buckets": buckets}


def _fitting(state: Mapping[str, Any], comm: Comm) -> dict[str, Any]:
    """Return a state for this rank; with another number of ranks, the parts' states start anew."""
    buckets = state["buckets"]
    if state["world_size"] != comm.world_size:
        buckets = [without_parts(bucket) for bucket in buckets]
    return {**state, "rank": comm.rank, "world_size": comm.world_size, "buckets": buckets}


def _broadcast(state: dict[str, Any] | None, source: int, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Broadcast the state of rank ``source`` to all ranks."""
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
