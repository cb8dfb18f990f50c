"""The names for writing your own parts, see `docs/extending.md`. Users of existing methods need none of them.

kinds        Selector, Fit, Exchange, Codec, IndexCodec, Feedback, Density, Reducer: base classes of parts
values       Layout, Step, Selection, SparseValues, Exchanged, Target: data passed between parts
requests     AllGather, AllGatherLists, AllToAll, AllReduce, Broadcast, Once: what a part yields to communicate
traffic      Choosing, Calls: what a part declares that it sends
helpers      target_count, generator, slices, build: used by most parts
"""

from micro.codecs.base import Codec, Key
from micro.codecs.indices import IndexCodec
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Once, Reduction
from micro.density.base import Density, DensitySchedule, Target, target_count
from micro.exchanges.base import Exchange, Needs, Transport, Wire
from micro.exchanges.predicted_traffic import Choice
from micro.feedback.base import Feedback, Memory
from micro.parts import NoState, Part, Rule, StatefulPart, as_part, build, check_rule, known
from micro.predicted_traffic import Calls, Choosing
from micro.reducers.base import BucketState, Reducer
from micro.selectors.base import Selector, Traits
from micro.selectors.estimated import CorrectedFit, Fit
from micro.values.flat import Layout
from micro.values.randomness import generator
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues, Step, cyclic_slice, equal_slice

__all__ = [
    "AllGather",
    "AllGatherLists",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "BucketState",
    "Calls",
    "Choice",
    "Choosing",
    "Codec",
    "Comm",
    "CorrectedFit",
    "Density",
    "DensitySchedule",
    "Exchange",
    "Exchanged",
    "Feedback",
    "Fit",
    "IndexCodec",
    "Key",
    "Layout",
    "Memory",
    "Needs",
    "NoState",
    "Once",
    "Overlap",
    "Part",
    "Reducer",
    "Reduction",
    "Rule",
    "Selection",
    "Selector",
    "SparseValues",
    "StatefulPart",
    "Step",
    "Target",
    "Traits",
    "Transport",
    "Wire",
    "as_part",
    "build",
    "carried_out",
    "check_rule",
    "cyclic_slice",
    "equal_slice",
    "generator",
    "known",
    "target_count",
]
