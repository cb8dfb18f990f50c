"""The functions attach and detach for a DistributedDataParallel model."""

from collections.abc import Callable
from typing import get_args

import torch.distributed as dist
from torch import nn

from micro.ddp.attachment import Attachment
from micro.ddp.checks import check_group, check_held, check_model, check_one_ddp, check_parameters, chosen_lane
from micro.ddp.hook import attached_to, hook_of
from micro.drivers.lane import LaneChoice
from micro.drivers.loss_scale import Scaler
from micro.drivers.meeting import meeting
from micro.drivers.settings import Choice, Settings
from micro.drivers.summary import StepSummary
from micro.drivers.wrappers import reduced_parameters, unwrapped
from micro.reducers.base import Reducer
from micro.reducers.scope import Scope
from micro.values.clipping import ClipNorm


def attach(
    model: nn.Module,
    reducer: Reducer,
    *,
    scope: Scope | str = "bucket",
    only: Choice | None = None,
    dense: Choice | None = None,
    start_step: int = 0,
    clip: float | None = None,
    clip_norm: ClipNorm | str = "rank",
    timed: bool = False,
    lane: LaneChoice | str = "auto",
    process_group: dist.ProcessGroup | None = None,
    on_step: Callable[[StepSummary], object] | None = None,
    scaler: Scaler | None = None,
) -> Attachment:
    """Average the gradients of ``model`` with ``reducer`` from now on, concurrently with backward.

    Call it once on all ranks, after wrapping the model and before its first backward. The training loop does not
    change: ``no_sync``, ``join``, frozen and unused parameters, mixed dtypes, checkpointed activations and
    gradient_as_bucket_view work as usual. A rank that has joined, because it is out of inputs, continues to send its
    residual, its share of earlier means, with a zero gradient. Complex parameters are reduced as real and imaginary
    parts, as in DDP.

    Args:
        model: a DistributedDataParallel, or one inside torch.compile or a framework's wrapper.
        scope: the vector in which indices are selected: each of DDP's buckets, each parameter, or the whole model. In
            any case messages are sent bucket by bucket; for the whole model, after the last bucket is ready.
        only: the parameters to reduce sparsely; all others are reduced densely. One or several patterns of names
            (``*`` is any text, ``?`` one character, ``[ab]`` a or b; names as in ``model.module.named_parameters()``,
            without wrappers' prefixes), or a function of name and parameter that returns a bool, called now for the
            parameters that are trained now. Dense parameters of a bucket are sent as a separate vector; see Split.
        dense: the parameters to reduce densely, in place of ``only``; all others are reduced sparsely.
        start_step: reduce everything densely before this step, without indices.
        clip: largest norm of the gradient; a larger gradient is first scaled down. This needs the whole gradient, so
            communication no longer overlaps with backward. torch's clip_grad_norm_ after backward would clip the sparse
            update, which contains residuals of many steps, and lose the difference.
        clip_norm: 'rank': each rank clips by its own norm. 'global': all ranks clip by the root of the mean over ranks
            of the squared norms, a bound on the norm of the mean gradient; one more all-reduce, of 8 bytes.
        timed: record the parts of each step (select_s, exchange_s, rest_s, exposed_s) on an accelerator too: the host
            then waits at the start and end of each part, so steps take longer. Otherwise they are NaN there. On a CPU
            they are always recorded, without waiting.
        lane: "thread" reduces in a separate thread during backward, in a separate group. "caller" reduces in the thread
            of backward, in the model's group: with one thread and one communicator, all ranks launch all collectives in
            one order. "auto" is "caller" on GPUs if backward has collectives (find_unused_parameters, SyncBatchNorm),
            and on CPUs for the dense mean, which starts its all-reduce and waits after backward, like DDP; otherwise
            "thread". Set "caller" on NCCL for collectives that it cannot detect. The updates are equal. See
            micro.drivers.lane.
        process_group: a group of the model's ranks that nothing else uses during backward. By default one is created
            for the thread, with the backend, timeout and options of the model's group, and destroyed by ``close``;
            yours is not.
        on_step: called on this rank with the statistics of each step, at the end of backward. An exception in it is
            raised by backward(), after gradients are reduced.
        scaler: the loss scaler: a GradScaler, an object with one as ``_scaler`` (timm's NativeScaler), or, for your own
            scaler, a function that returns the current scale (``lambda: trainer.loss_scale``), equal on all ranks. It
            handles non-finite steps, whatever the reducer's policy: all gradients become Inf, so it skips the
            optimizer's step and lowers the scale. Residuals follow the scale. clip is in units of unscaled gradients.

    Returns:
        the attachment, with the statistics of the last step and the state for checkpoints.

    Raises:
        ValueError: the model is not a DistributedDataParallel, is inside another one, has a communication hook or
            sparse gradients, or has other parameters than when it was wrapped; the reducer does not support the scope;
            only or dense match nothing, the same parameters, or leave none to sparsify; parameters are on several
            devices or one has too many elements; clip, reducer or process_group are invalid; or ranks have different
            settings or models. Raised on all ranks, with nothing attached. From an optimizer's step: it would use
            gradients that were not averaged. From backward(): with clip, or momentum correction, gradients of the last
            step were not cleared.
        PeerError: a rank did not call it.
        NonFiniteGradient: from backward(), on all ranks, if the policy is to stop, or after 100 skipped steps in a row.
            All gradients are then zero, residuals are as if nothing had been sent, and training can continue.
    """
    settings = Settings(
        scope=scope,
        only=only,
        dense=dense,
        start_step=start_step,
        clip=clip,
        clip_norm=clip_norm,
        timed=timed,
        on_step=on_step,
        scaler=scaler,
    )
    with meeting("micro.attach", lambda: unwrapped(model).process_group) as entry:
        ddp = unwrapped(model)
        check_model(ddp)
        check_one_ddp(ddp)
        trained = reduced_parameters(ddp)
        reducer = settings.fitted(reducer, trained, get_args(ClipNorm))
        lane = chosen_lane(lane, ddp, reducer)
        check_group(process_group, ddp, lane=lane)
        check_parameters(trained, whole_model=settings.whole_model)
        check_held(ddp)
        if hook_of(ddp).attached is not None:
            raise ValueError("model has an attachment: close that one first, for instance by micro.detach(model)")
        made = "made" if process_group is None else "given"
        entry.settings |= settings.described(reducer) | {"lane": lane, "process_group": made}
        entry.parameters, entry.is_exact = trained, False
    return Attachment(ddp, reducer, settings, lane=lane, process_group=process_group)


def detach(model: nn.Module) -> None:
    """Close the attachment of ``model``, whose gradients DDP then averages again. See Attachment.close.

    Raises:
        ValueError: nothing is attached to it.
    """
    attached = attached_to(unwrapped(model))
    if attached is None:
        raise ValueError("model has no attachment: there is nothing to detach")
    attached.close()
