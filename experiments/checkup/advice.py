"""Which method is predicted to reach dense's accuracy first on a link: what `experiments.advise` says, a line each."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.checkup.break_even import human_rate
from experiments.checkup.findings import Finding
from experiments.config.paths import ROOT
from experiments.reports.names import human, label
from experiments.studies.advice.evidence import Evidence, load_evidence
from experiments.studies.advice.files import describe
from experiments.studies.advice.prediction import Setting, predict
from experiments.studies.simulated_steps.method_choices import DENSE, MEMORY_GB_S
from experiments.studies.simulated_steps.networks import load_measured
from micro.planning.costs import Link
from micro.planning.traces import Trace

TRACE = ROOT / "results/published/traces/resnet18.json"
LEVEL = 95  # percent of dense's end
NAME = "first there"


def findings(links: Mapping[str, Link], world_size: int, trace: Path | None) -> Iterator[Finding]:
    """Yield for each link the method that takes least time to dense's accuracy, and the rate below which it pays.

    Args:
        trace: profile of a model, that of `experiments.profile backward`; a published one where none is given.

    Raises:
        UserError: the profile cannot be used.
    """
    if world_size == 1:
        return
    if not TRACE.exists():
        yield Finding(name=NAME, value="unknown", note="published trainings are in a clone alone", state="absent")
        return
    evidence, profile = load_evidence(None, LEVEL), load_measured(Trace, trace or TRACE)
    for name, link in links.items():
        rate = 8 / link.beta_s if link.beta_s else math.inf
        setting = Setting(profile, world_size, rate, link.alpha_s, select=None, memory_gb_s=MEMORY_GB_S)
        yield _finding(evidence, setting, name)
    note = f"epochs of {describe(evidence)}; steps of {human(profile.model)}, predicted from its profile"
    yield Finding(name="evidence", value="", note=note)


def _finding(evidence: Evidence, setting: Setting, name: str) -> Finding:
    rows = predict(evidence, setting)
    best = rows[(rows["why"] == "") & (rows["method"] != DENSE)].sort_values("time").iloc[0]
    method, gain, border = label(best["method"], best["variant"]), float(best["time"]), float(best["border"])
    density = "" if best["density"] == 1 else f" at density {best['density']:g}"
    below = "at any rate" if math.isinf(border) else f"below {human_rate(border)}" if border else "at no rate"
    return Finding(
        name=f"{NAME}, {name}",
        value=method if gain < 1 else label(DENSE),
        note=f"{method}{density} takes {gain:.2g} of DDP's time to {LEVEL} % of dense's end; it pays {below}",
        state="here" if gain < 1 else "absent",
        data={"method": best["method"], "time_of_dense": gain, "pays_below_bits_per_s": border},
    )
