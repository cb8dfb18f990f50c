"""The driver for local steps (LocalSGD, DiLoCo): ranks train alone for H steps, then reduce weight differences."""

from micro.local.outer import Outer
from micro.local.regrouping import Regrouped, check_losable, regrouped, save_round, take_round
from micro.local.round_stats import RoundStats
from micro.local.steps import LocalSteps

__all__ = [
    "LocalSteps",
    "Outer",
    "Regrouped",
    "RoundStats",
    "check_losable",
    "regrouped",
    "save_round",
    "take_round",
]
