"""Train deep networks on many workers with sparsified gradients.

    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    micro.attach(ddp_model, reducer)

A method is a composition: density x selector x exchange x feedback x codec. Every part is also known by the word that a
yaml uses for it: ``micro.build(micro.Selector, "topk")``, ``micro.known(micro.Exchange)``.
"""

from micro.codecs.base import Codec
from micro.codecs.half import BFloat16, Half
from micro.codecs.raw import Raw
from micro.comm import Comm, GroupComm, SoloComm
from micro.ddp import Attachment, attach
from micro.density import Constant, Density, WarmUp
from micro.exchanges.base import Exchange
from micro.exchanges.gather import Gather
from micro.exchanges.union import Union
from micro.feedback import ErrorFeedback, Feedback, NoFeedback
from micro.flat import Layout
from micro.health import NonFiniteGradient
from micro.index_codecs import IndexCodec, Int32
from micro.parts import build, known
from micro.reducers.base import Reducer
from micro.reducers.dense import DenseReducer
from micro.reducers.sparse import SparseReducer
from micro.selectors.base import Selector
from micro.selectors.leader import Leader
from micro.selectors.micro import Micro
from micro.selectors.randomk import RandomK
from micro.selectors.threshold import Threshold
from micro.selectors.topk import TopK
from micro.simulate import SimulatedStep, Simulation
from micro.sparse import Exchanged, Overlap, Selection, SparseValues
from micro.stats import StepStats

__all__ = [
    "Attachment",
    "BFloat16",
    "Codec",
    "Comm",
    "Constant",
    "DenseReducer",
    "Density",
    "ErrorFeedback",
    "Exchange",
    "Exchanged",
    "Feedback",
    "Gather",
    "GroupComm",
    "Half",
    "IndexCodec",
    "Int32",
    "Layout",
    "Leader",
    "Micro",
    "NoFeedback",
    "NonFiniteGradient",
    "Overlap",
    "RandomK",
    "Raw",
    "Reducer",
    "Selection",
    "Selector",
    "SimulatedStep",
    "Simulation",
    "SoloComm",
    "SparseReducer",
    "SparseValues",
    "StepStats",
    "Threshold",
    "TopK",
    "Union",
    "WarmUp",
    "attach",
    "build",
    "known",
]
