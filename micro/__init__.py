"""Train deep networks on many workers with sparsified gradients.

    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    micro.attach(ddp_model, reducer)

A method is a composition: density x selector x exchange x feedback x codec. Every part is also known by the word that a
yaml uses for it: ``micro.build(micro.Selector, "topk")``, ``micro.known(micro.Exchange)``.

Reading order:

    values/            flat, sparse: Layout, named parameters as one vector; Step, Selection, Exchanged, which parts
                       pass to each other; partition: which slice a rank searches; norms, clipping, what is finite
    comm/              ranks: whom a reduction asks, bytes and times; requests: what it asks, by ``yield``; loop:
                       carries reductions out, several of which share rounds of messages; group: the only file that
                       starts the collectives of steps; peers: which rank failed; lockstep: n ranks in one process
    simulate           reductions of n ranks in one process
    parts              Part, build, known: parts by name, those of other packages too
    retired            what micro no longer has, and what to use instead
    selectors/         which indices a rank sends
    exchanges/         how the ranks' indices and values meet
    codecs/            the bytes of values and of indices
    feedback, density/ what becomes of what was not sent; how much to send at each step
    reducers/          sparse: the pipeline that runs these parts; quantized: all values with a codec; methods that do
                       without; outcome: how a reduction ends; stats: what it reports; scope: a bucket, each parameter
                       or the whole model
    predicted_traffic  what a method is expected to send
    drivers/           what drivers share: states of buckets, the lane that reduces, the scale of the loss, summaries
    ddp/, fsdp/, local/         for DistributedDataParallel, FSDP2, and H steps of each worker alone
    optim/             optimizers for sparse updates: they know of drivers/arrivals what came for each element
    checkpoints/       an attachment's state as saved: its form, one state for every rank, another number of ranks
    patches/           what changed between two versions of weights: files and broadcasts to copies that are served
    kernels/           the hot loops: compiled where numba is installed, in plain torch elsewhere
    zoo/               rules and baselines of papers, imported when they are named
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
from micro.feedback import ErrorFeedback, Feedback, MomentumCorrection, NoFeedback
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
