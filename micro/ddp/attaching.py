"""The functions attach and detach for a DistributedDataParallel model."""

from collections.abc import Callable
from typing import get_args

import torch.distributed as dist
from torch import nn

from micro.ddp.attachment import Attachment, attached_to, hook_of
from micro.ddp.checks import check_group, check_held, check_model, check_one_ddp, check_parameters, chosen_lane
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
    """Let ``reducer`` average the gradients of ``model`` from now on, while backward goes on.

    Call it once, on all ranks of the model, after it is wrapped and before its first backward. The training loop stays
    as it is: ``no_sync``, ``join``, frozen and unused parameters, mixed dtypes, checkpointed activations and
    gradient_as_bucket_view work as they do without it. A rank that has joined, because it is out of inputs, goes on to
    send what its residual holds, with a gradient of zero: what it kept is its share of earlier means. A complex
    parameter is reduced as the real and imaginary parts of its elements, as DDP does.

    Args:
        model: a DistributedDataParallel, or one inside torch.compile or a framework's wrapper.
        scope: the vector in which indices are selected: each of DDP's buckets, each parameter by itself, or all
            parameters together. A bucket travels as one in any case: what is selected within parameters is sent bucket
            by bucket, and so is what is selected within the whole model, once the last bucket is there.
        only, dense: the parameters to reduce sparsely, or those to reduce densely; all others are the other way. Each a
            pattern of names or several (``*`` is any text, ``?`` one character, ``[ab]`` a or b; names as
            ``model.module.named_parameters()`` gives them, without wrappers' words), or a function of name and
            parameter that returns a bool, asked now about the parameters that are trained now.
            Dense parameters of a bucket travel as a vector of their own; see Split.
        start_step: reduce everything densely up to this step, without indices.
        clip: the greatest norm of the gradient; a larger one is scaled down before anything else. That needs the whole
            gradient, so that backward hides no communication any more. torch's clip_grad_norm_ after
            backward bounds the sparse update instead, which holds residuals of many steps, and loses what it cuts off.
        clip_norm: 'rank': each rank's own norm, and each scales its own gradient. 'global': the root of the mean over
            ranks of the squared norms, which bounds the norm of the mean gradient, and all ranks scale alike; one more
            all-reduce, of 8 bytes.
        timed: record the parts of each step (select_s, exchange_s, rest_s, exposed_s) on an accelerator too: the host
            waits for it where a part begins and ends, so that less runs concurrently and steps take longer. Without it
            they are NaN there. On a CPU they are recorded either way, and nothing waits.
        lane: "thread" reduces in a thread of its own while backward goes on, over a group of its own. "caller" reduces
            in the thread of backward, over the model's own group: one thread and one communicator, so that all ranks
            launch all collectives in one order. "auto" is "caller" on GPUs where backward has collectives of its own
            (find_unused_parameters, SyncBatchNorm), and on CPUs for the dense mean, which starts its all-reduce and
            waits after backward, as DDP does; else "thread". Say "caller" on NCCL for others that it cannot see.
            The updates are the same. micro.drivers.lane says why.
        process_group: the ranks of the model in a group that nothing else uses while backward runs. By default a
            group is made for the thread, with the backend, the timeout and the options of the model's own, and
            destroyed by ``close``; yours is left as it is.
        on_step: called on this rank with the statistics of each step, at the end of its backward, before the optimizer
            steps. An exception in it comes out of backward(); the gradients are reduced then.
        scaler: what scales the loss: a GradScaler, an object that holds one as ``_scaler`` (NativeScaler of timm), or,
            for a scaler of your own, a function that returns the present scale (``lambda: trainer.loss_scale``), the
            same on all ranks. A step that is not finite is left to your scaler, whatever the reducer's policy: all
            gradients become Inf, so that it leaves out the optimizer's step and lowers the scale. What is kept follows
            the scale. clip is in units of unscaled gradients.

    Returns:
        the attachment, which holds the statistics of the last step and everything a checkpoint needs.

    Raises:
        ValueError: the model is not a DistributedDataParallel, is inside of another one, has a communication hook,
            makes sparse gradients, or has other parameters than when it was wrapped; the reducer cannot select within
            this scope; only or dense match nothing, the same parameters, or leave none to sparsify; its parameters are
            on several devices or one has too many elements; or clip, the reducer or process_group is none; or ranks
            were given different settings or models. Raised on all ranks where it is raised on one, and nothing is left
            behind. Out of an optimizer's step: it would use gradients that nothing has averaged. Out of backward():
            with clip, or momentum correction, it began with averaged gradients of the last one.
        PeerError: a rank did not call it.
        NonFiniteGradient: out of backward(), on all ranks, if the policy is to stop, or after 100 skipped steps in a
            row. All gradients are zero then, and residuals are as if nothing had been sent; DDP's own work is done, so
            the model can be trained on.
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
    """Close what is attached to ``model``: DDP averages its gradients again. See Attachment.close.

    Raises:
        ValueError: nothing is attached to it.
    """
    attached = attached_to(unwrapped(model))
    if attached is None:
        raise ValueError("model has no attachment: there is nothing to detach")
    attached.close()
