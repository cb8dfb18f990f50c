"""Train deep networks on many workers with sparsified gradients.

    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    micro.attach(ddp_model, reducer)

A method is a composition: density x selector x exchange x feedback x codec. Every part is also known by the word that a
yaml uses for it: ``micro.build(micro.Selector, "topk")``, ``micro.known(micro.Exchange)``.

Reading order:

    flat, sparse       Layout: named parameters as one vector; Step, Selection, Exchanged: what parts pass to each other
    comm, operations   the collectives: the only file that calls them, and where bytes are counted; their names
    parts, installed   Part, build, known: parts by name; parts that other packages bring
    selectors/         which indices a rank sends; partition: which slice it searches
    exchanges/         how the ranks' indices and values meet; scope: a bucket, each parameter or the whole model
    codecs/            the bytes of values; index_codecs: the bytes of indices; bits: packing both
    feedback, density  what becomes of what was not sent; how much to send at each step
    reducers/          the pipeline that runs these parts (sparse), and methods that do without them
    stats, summary, nonfinite   what a step reports; NaN and Inf; clipping, randomness, transforms: helpers
    ddp/               the driver for DistributedDataParallel; private_comm: its group; peer_failures: who failed
    fsdp/              the driver for FSDP2: sparse between the replicas of a sharded model
    local/             the driver for local steps: H steps of each worker alone, then differences of weights are reduced
    drivers/           what both share: states of buckets, the lane that reduces, scales of losses; wrappers of models
    checkpoints/       an attachment's state as saved: its form, one state for every rank, another number of ranks
    sign_sgd           the optimizer that steps by signs
    simulate           n ranks in one process
    kernels/           the hot loops: compiled where numba is installed, in plain torch elsewhere
    planning/          costs, traces, bucket schedules, theory: not imported from here
"""

from micro import kernels
from micro.checkpoints.rank_states import AllRanks, RankStates
from micro.checkpoints.resizing import average
from micro.codecs.base import Codec, Key
from micro.codecs.half import BFloat16, Half
from micro.codecs.indices import Bitmap, IndexCodec, Int32, Packed, Shortest
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.raw import Raw
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.comm import Comm, Traffic
from micro.ddp import Attachment, attach, detach
from micro.density.accordion import Accordion
from micro.density.accordion_published import PublishedAccordion
from micro.density.base import Density, DensitySchedule, Target, target_count
from micro.density.by_name import ByName
from micro.density.constant import Constant
from micro.density.warmup import WarmUp
from micro.exchanges.base import Exchange, Wire
from micro.exchanges.dsa import DSA
from micro.exchanges.gather import Gather
from micro.exchanges.in_pieces import InPieces
from micro.exchanges.oktopk import Oktopk
from micro.exchanges.union import Union
from micro.feedback import EF21, ErrorFeedback, Feedback, Memory, MomentumCorrection, NoFeedback
from micro.flat import Layout
from micro.fsdp import ShardedAttachment, attach_fsdp
from micro.group_comm import GroupComm
from micro.local import LocalSteps, Outer, RoundStats
from micro.lockstep import SimulatedRanks
from micro.nonfinite import NonFiniteGradient, Policy
from micro.partition import cyclic_slice, equal_slice
from micro.parts import NoState, Part, Rule, StatefulPart, as_part, build, check_rule, known
from micro.peer_failures import PeerError
from micro.randomness import generator
from micro.reducers.base import BucketState, Reducer
from micro.reducers.dense import DenseReducer
from micro.reducers.powersgd import PowerSGD
from micro.reducers.sparse import SparseReducer
from micro.reducers.split import Split
from micro.reducers.two_level import TwoLevel
from micro.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Once, Reduction, carried_out
from micro.scope import Scope, scoped
from micro.selectors.base import Selector, Traits
from micro.selectors.estimated import Estimated, Fit
from micro.selectors.everything import Everything
from micro.selectors.leader import Leader
from micro.selectors.micro import Micro
from micro.selectors.per_tensor import PerTensor
from micro.selectors.randomk import RandomK
from micro.selectors.scaled import Scaled
from micro.selectors.scaled_elements import ScaledElements
from micro.selectors.threshold import Threshold
from micro.selectors.topk import TopK
from micro.sign_sgd import SignSGD
from micro.simulate import SimulatedStep, Simulation
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step
from micro.stats import StepStats
from micro.summary import StepSummary

__version__ = "0.1.0"

__all__ = [
    "DSA",
    "EF21",
    "QSGD",
    "Accordion",
    "AllGather",
    "AllGatherLists",
    "AllRanks",
    "AllReduce",
    "AllToAll",
    "Attachment",
    "BFloat16",
    "Bitmap",
    "Broadcast",
    "BucketState",
    "ByName",
    "Codec",
    "Comm",
    "Constant",
    "DenseReducer",
    "Density",
    "DensitySchedule",
    "ErrorFeedback",
    "Estimated",
    "Everything",
    "Exchange",
    "Exchanged",
    "Feedback",
    "Fit",
    "Gather",
    "GroupComm",
    "Half",
    "InPieces",
    "IndexCodec",
    "Int8",
    "Int32",
    "Key",
    "Layout",
    "Leader",
    "LocalSteps",
    "Memory",
    "Micro",
    "MomentumCorrection",
    "NoFeedback",
    "NoState",
    "NonFiniteGradient",
    "Oktopk",
    "Once",
    "Outer",
    "Overlap",
    "Packed",
    "Part",
    "PeerError",
    "PerTensor",
    "Policy",
    "PowerSGD",
    "PublishedAccordion",
    "RandomK",
    "RankStates",
    "Raw",
    "Reducer",
    "Reduction",
    "RoundStats",
    "Rule",
    "Scaled",
    "ScaledElements",
    "Scope",
    "Selection",
    "Selector",
    "ShardedAttachment",
    "Shortest",
    "Sign",
    "SignSGD",
    "SimulatedRanks",
    "SimulatedStep",
    "Simulation",
    "SparseReducer",
    "SparseValues",
    "Split",
    "StatefulPart",
    "Step",
    "StepStats",
    "StepSummary",
    "Target",
    "Threshold",
    "TopK",
    "Traffic",
    "Traits",
    "TwoLevel",
    "TwoMeans",
    "Union",
    "WarmUp",
    "Wire",
    "__version__",
    "as_part",
    "attach",
    "attach_fsdp",
    "average",
    "build",
    "carried_out",
    "check_rule",
    "cyclic_slice",
    "detach",
    "equal_slice",
    "generator",
    "kernels",
    "known",
    "scoped",
    "target_count",
]
