"""How MiCRO's threshold follows the density: the authors' way, mended, and agreed upon within the step."""

from typing import Any

from micro.selectors.micro_rules.agreed import Agreed
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.selectors.micro_rules.repaired import Repaired

RULES: dict[str, ThresholdRule[Any]] = {"agreed": Agreed(), "repaired": Repaired(), "published": Published()}

__all__ = ["RULES", "Found", "Search", "ThresholdRule"]
