"""Train deep networks on many workers with sparsified gradients.

    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    micro.attach(ddp_model, reducer)

A method combines a density, a selector, an exchange, a feedback and a codec. Each part also has a name for yaml files:
``micro.build(micro.Selector, "topk")``; ``micro.known(micro.Exchange)`` lists them.

Reading order:

    values/            flat, sparse: Layout, named parameters as one vector; Step, Selection, Exchanged, which parts
                       pass to each other; partition: a rank's slice; norms, clipping, checks for NaN and Inf
    comm/              ranks: the ranks of a reduction, its bytes and times; requests: what a reduction yields;
                       loop: runs reductions and merges their messages into rounds; group: the only file that
                       starts the collectives of steps; peers: which rank failed; lockstep: n ranks in one process
    simulate           a reducer on n ranks in one process
    parts              Part, build, known: parts by name, including those of other packages
    retired            removed names, and what replaces them
    selectors/         which indices a rank sends
    exchanges/         how the ranks' indices and values become one update
    codecs/            how values and indices are encoded as bytes
    feedback, density/ error feedback (the residual); how much to send at each step
    reducers/          sparse: the pipeline that runs these parts; quantized: all values with a codec; PowerSGD, dense
                       and others; outcome: how a reduction ends; stats: what it reports; scope: one bucket, each
                       parameter or the whole model
    predicted_traffic  what a method is expected to send
    drivers/           shared by all drivers: states of buckets, the reducing thread (lane), loss scaling, summaries
    ddp/, fsdp/, local/         for DistributedDataParallel, FSDP2, and local steps between averages
    optim/             optimizers for sparse updates; drivers/arrivals tells them which elements arrived
    checkpoints/       saved states of attachments: their format, one per rank, resuming with more or fewer ranks
    patches/           differences between two versions of weights, as files and broadcasts to serving copies
    kernels/           the hot loops: compiled where numba is installed, in plain torch elsewhere
    zoo/               rules and baselines of papers, imported on first use
"""

from typing import Any

from micro import retired
from micro.checkpoints.rank_states import AllRanks, RankStates
from micro.checkpoints.resizing import average
from micro.codecs.base import Codec
from micro.codecs.fp8 import FP8
from micro.codecs.half import BFloat16, Half
from micro.codecs.indices import Bitmap, IndexCodec, Packed, Shortest
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.comm.peers import PeerError
from micro.ddp import Attachment, attach, detach
from micro.density.base import Density
from micro.density.by_name import ByName
from micro.density.warmup import WarmUp
from micro.drivers.summary import StepSummary
from micro.exchanges.base import Exchange
from micro.exchanges.dsa import DSA
from micro.exchanges.gather import Gather
from micro.exchanges.oktopk import Oktopk
from micro.exchanges.union import Union
from micro.feedback.base import Feedback
from micro.feedback.momentum import MomentumCorrection
from micro.feedback.none import NoFeedback
from micro.feedback.residual import ErrorFeedback
from micro.fsdp import ShardedAttachment, attach_fsdp
from micro.local import LocalSteps, Outer
from micro.optim.sign_sgd import SignSGD
from micro.optim.sparse_adamw import SparseAdamW
from micro.parts import build, known
from micro.reducers.base import Reducer
from micro.reducers.dense import DenseReducer
from micro.reducers.powersgd import PowerSGD
from micro.reducers.quantized import Quantized
from micro.reducers.sparse import SparseReducer
from micro.reducers.split import Split
from micro.reducers.stats import StepStats
from micro.reducers.two_level import TwoLevel
from micro.selectors.base import Selector
from micro.selectors.estimated import Estimated
from micro.selectors.everything import Everything
from micro.selectors.leader import Leader
from micro.selectors.micro import Micro
from micro.selectors.per_tensor import PerTensor
from micro.selectors.randomk import RandomK
from micro.selectors.threshold import Threshold
from micro.selectors.topk import TopK
from micro.simulate import Simulation
from micro.values.flat import Layout
from micro.values.nonfinite import NonFiniteGradient

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    raise AttributeError(retired.refusal_of_name(f"micro.{name}") or f"module 'micro' has no attribute {name!r}")


retired.refuse_imports()


__all__ = [
    "DSA",
    "FP8",
    "QSGD",
    "AllRanks",
    "Attachment",
    "BFloat16",
    "Bitmap",
    "ByName",
    "Codec",
    "DenseReducer",
    "Density",
    "ErrorFeedback",
    "Estimated",
    "Everything",
    "Exchange",
    "Feedback",
    "Gather",
    "Half",
    "IndexCodec",
    "Int8",
    "Layout",
    "Leader",
    "LocalSteps",
    "Micro",
    "MomentumCorrection",
    "NoFeedback",
    "NonFiniteGradient",
    "Oktopk",
    "Outer",
    "Packed",
    "PeerError",
    "PerTensor",
    "PowerSGD",
    "Quantized",
    "RandomK",
    "RankStates",
    "Reducer",
    "Selector",
    "ShardedAttachment",
    "Shortest",
    "Sign",
    "SignSGD",
    "Simulation",
    "SparseAdamW",
    "SparseReducer",
    "Split",
    "StepStats",
    "StepSummary",
    "Threshold",
    "TopK",
    "TwoLevel",
    "Union",
    "WarmUp",
    "__version__",
    "attach",
    "attach_fsdp",
    "average",
    "build",
    "detach",
    "known",
]
