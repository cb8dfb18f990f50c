"""Train deep networks on many workers with sparsified gradients.

    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    micro.attach(ddp_model, reducer)

A method is a composition: density x selector x exchange x feedback x codec. Every part is also known by the word that a
yaml uses for it: ``micro.build(micro.Selector, "topk")``, ``micro.known(micro.Exchange)``.
"""

from micro.codecs.base import Codec
from micro.codecs.half import BFloat16, Half
from micro.codecs.int8 import Int8
from micro.codecs.natural import Natural
from micro.codecs.onebit import OneBit
from micro.codecs.qsgd import QSGD
from micro.codecs.range_float import RangeFloat
from micro.codecs.raw import Raw
from micro.codecs.sign import Sign
from micro.codecs.terngrad import TernGrad
from micro.comm import Comm, GroupComm, SoloComm
from micro.ddp import Attachment, attach
from micro.density import Accordion, Constant, Density, WarmUp
from micro.exchanges.base import Exchange
from micro.exchanges.dsa import DSA
from micro.exchanges.gather import Gather
from micro.exchanges.gtopk import GTopK
from micro.exchanges.in_pieces import InPieces
from micro.exchanges.oktopk import Oktopk
from micro.exchanges.union import Union
from micro.feedback import ErrorFeedback, Feedback, MomentumCorrection, NoFeedback
from micro.flat import Layout
from micro.index_codecs import Bitmap, IndexCodec, Int32, Packed, Shortest
from micro.nonfinite import NonFiniteGradient
from micro.parts import build, known
from micro.reducers.base import Reducer
from micro.reducers.dense import DenseReducer
from micro.reducers.fft import FFTReducer
from micro.reducers.powersgd import PowerSGD
from micro.reducers.sparse import SparseReducer
from micro.scope import Scope
from micro.selectors.base import Selector
from micro.selectors.deft import Deft
from micro.selectors.dgc import DGC
from micro.selectors.everything import Everything
from micro.selectors.exdyna import ExDyna
from micro.selectors.gaussiank import GaussianK
from micro.selectors.leader import Leader
from micro.selectors.micro import Micro
from micro.selectors.per_tensor import PerTensor
from micro.selectors.randomk import RandomK
from micro.selectors.redsync import RedSync
from micro.selectors.reused import Reused
from micro.selectors.sage import Sage
from micro.selectors.sidco import Sidco
from micro.selectors.threshold import Threshold
from micro.selectors.topk import TopK
from micro.simulate import SimulatedStep, Simulation
from micro.sparse import Exchanged, Overlap, Selection, SparseValues
from micro.stats import StepStats

__all__ = [
    "DGC",
    "DSA",
    "QSGD",
    "Accordion",
    "Attachment",
    "BFloat16",
    "Bitmap",
    "Codec",
    "Comm",
    "Constant",
    "Deft",
    "DenseReducer",
    "Density",
    "ErrorFeedback",
    "Everything",
    "ExDyna",
    "Exchange",
    "Exchanged",
    "FFTReducer",
    "Feedback",
    "GTopK",
    "Gather",
    "GaussianK",
    "GroupComm",
    "Half",
    "InPieces",
    "IndexCodec",
    "Int8",
    "Int32",
    "Layout",
    "Leader",
    "Micro",
    "MomentumCorrection",
    "Natural",
    "NoFeedback",
    "NonFiniteGradient",
    "Oktopk",
    "OneBit",
    "Overlap",
    "Packed",
    "PerTensor",
    "PowerSGD",
    "RandomK",
    "RangeFloat",
    "Raw",
    "RedSync",
    "Reducer",
    "Reused",
    "Sage",
    "Scope",
    "Selection",
    "Selector",
    "Shortest",
    "Sidco",
    "Sign",
    "SimulatedStep",
    "Simulation",
    "SoloComm",
    "SparseReducer",
    "SparseValues",
    "StepStats",
    "TernGrad",
    "Threshold",
    "TopK",
    "Union",
    "WarmUp",
    "attach",
    "build",
    "known",
]
