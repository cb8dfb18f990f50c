"""Carry out a case: the undisturbed run, then the disturbed attempts until the run has ended."""

import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from experiments.ranks.hosts import Hosts
from tests.soak import advice, points
from tests.soak.attempt import Attempt, Command, Ended
from tests.soak.case import TIME, Fault, Setup, draw_plan
from tests.soak.damage import Damage, small_disk
from tests.soak.forked import HOST, SPACE
from tests.soak.verdict import Outcome, error_lines, is_done, outcome_of, problems_of_attempt, problems_of_end

TIMEOUT_S = 90  # of collectives: a rank stands still after a fifth of it, which a busy machine must not take
_CALM_ATTEMPTS = 4  # after the last fault; more than one where an error's advice has to be followed


@dataclass
class Result:
    """What became of a case.

    Attributes:
        fired: The faults that came, by kind.
        story: A line per attempt.
        problems: What was wrong, empty if nothing was.
        refused: Whether an error's advice had to be followed.
        longest_s: The longest attempt.
    """

    fired: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: bool = False
    longest_s: float = 0.0


class Trial:
    """The trainings of one setup.

    Args:
        folder: For everything that they leave; made anew.
        hosts: For a setup on hosts.
    """

    def __init__(self, setup: Setup, folder: Path, hosts: Hosts | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._setup, self._folder, self._hosts = setup, folder, hosts if setup.kind == "hosts" else None
        ended = self._attempt(folder / "whole", folder / "whole.attempt", ())
        found = problems_of_attempt(ended, setup, folder / "whole", torn=False)
        self._expected = outcome_of(folder / "whole")
        self.problems = found or ([] if self._expected else ["the undisturbed run did not finish"])
        self._counts = points.read_counts(folder / "whole.attempt") or {"command": {TIME: int(10 * ended.elapsed_s)}}

    def disturb(self, seed: int, faults: Collection[str], impossible: Collection[str] = ()) -> Result:
        """Carry out the case of a seed.

        Args:
            faults: Kinds of faults.
            impossible: Those that this machine cannot have: they do not come, and the others are the same.
        """
        result, output = Result(problems=[f"undisturbed: {line}" for line in self.problems]), self._folder / f"{seed}"
        if result.problems:
            return result
        assert self._expected
        plan = draw_plan(seed, faults, self._counts, self._setup)
        with ExitStack() as closing:
            if "full" not in impossible and any(fault.kind == "full" for each in plan.attempts for fault in each):
                closing.enter_context(small_disk(output))
                closing.callback(self._keep, output, result)
            run = _Disturbed(self, output, result)
            for during, after in zip(plan.attempts, plan.between, strict=True):
                if is_done(output):
                    break
                run.attempt([fault for fault in during if fault.kind not in impossible])
                run.tear(after)
            run.finish(self._expected)
            if plan.after and not result.problems:
                run.tear(plan.after, finished=True)
                run.finish(self._expected)
        return result

    def forget(self, seed: int) -> None:
        """Remove what a case left."""
        for path in self._folder.glob(f"{seed}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _keep(self, output: Path, result: Result) -> None:
        if result.problems:  # the small disk vanishes
            shutil.copytree(output, output.with_name(f"{output.name}.disk"))

    def _attempt(
        self,
        output: Path,
        folder: Path,
        faults: Sequence[Fault],
        damage: Damage | None = None,
        more: Sequence[str] = (),
    ) -> Ended:
        commands = self._commands([*self._setup.words, f"output={output}", *more])
        return Attempt(folder, commands, faults, (damage or Damage(output, self._hosts)).act).run()

    def _commands(self, words: list[str]) -> list[Command]:
        train, number = ["-m", "experiments.train", *words], self._setup.num_ranks
        if self._setup.kind == "simulated":
            return [Command("command", [*train, "cluster=simulated", f"cluster.world_size={number}"])]
        train.append(f"cluster.timeout_s={TIMEOUT_S}")
        if self._setup.kind in ("local", "started"):
            forked = self._setup.kind == "local"
            return [Command("command", [*train, f"cluster.nproc_per_node={number}"], forked=forked)]
        if self._setup.kind == "torchrun":
            agent = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={number}",
                "--monitor-interval=0.1",
            ]
            return [Command("agent", [*agent, *train])]
        assert self._hosts
        nodes = ["cluster=nodes", "cluster.nproc_per_node=1", f"cluster.nnodes={number}"]
        meeting = f"cluster.rdzv_endpoint={self._hosts.names[0]}:29500"
        places = zip(self._hosts._spaces, self._hosts.names, strict=True)
        return [
            Command(f"command{place}", [*train, *nodes, meeting], {SPACE: space, HOST: name})
            for place, (space, name) in enumerate(places)
        ]


class _Disturbed:
    """The attempts of one case."""

    def __init__(self, trial: Trial, output: Path, result: Result) -> None:
        self._trial, self._output, self._result = trial, output, result
        self._damage = Damage(output, trial._hosts)
        self._more: list[str] = []  # words that errors advised
        self._torn = False
        self._number = 0

    def attempt(self, faults: Sequence[Fault] = ()) -> Ended:
        """Give the command once, note how it ended and what was wrong with that."""
        self._number += 1
        folder = self._output.with_name(f"{self._output.name}.{self._number}")
        ended = self._trial._attempt(self._output, folder, faults, self._damage, self._more)
        self._damage.free()
        found = problems_of_attempt(ended, self._trial._setup, self._output, torn=self._torn)
        result = self._result
        result.problems += [f"attempt {self._number}: {line}" for line in found]
        result.fired.update(fault.kind for fault in ended.fired)
        result.longest_s = max(result.longest_s, ended.elapsed_s)
        faults_told = ", ".join(map(str, ended.fired)) or "no fault"
        errors = "".join(f"; {line}" for line in error_lines(ended))
        result.story.append(f"{self._number}: {faults_told}; exit code {ended.codes}{errors}")
        return ended

    def tear(self, faults: Sequence[Fault], *, finished: bool = False) -> None:
        """Tear files of a run, if it is finished or not as ``finished`` says."""
        for fault in faults:
            if is_done(self._output) == finished and (name := self._damage.tear(fault)):
                self._torn = True
                self._result.fired["torn"] += 1
                self._result.story.append(f"{fault}: {name}")

    def finish(self, expected: Outcome) -> None:
        """Give the command until the run has ended, follow what its errors advise, and compare its end."""
        self._more = []
        for _ in range(_CALM_ATTEMPTS):
            ended = self.attempt()
            if not any(ended.codes):
                break
            if not self._follow(ended):
                return
        self._result.problems += problems_of_end(self._output, expected)

    def _follow(self, ended: Ended) -> bool:
        errors = error_lines(ended)
        words = advice.follow(errors[-1]) if errors else None
        if words is None:
            self._result.problems.append(f"no advice to follow: {errors[-1:] or ended.codes}")
            return False
        self._result.refused = True
        self._more = words
        return True
