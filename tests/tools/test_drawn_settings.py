"""Whatever settings a training is given, its command describes runs or is refused in one line: drawn by hypothesis.

The number of drawn commands is small and always the same; MICRO_FUZZ=20000 draws that many others.
"""

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.configuration import set_hypothesis_home_dir

from experiments.config.schema import TrainConfig, from_yaml, to_yaml
from experiments.training import one_run
from tests.drawn_settings import Words, words
from tests.in_process import call

NUMBER = int(os.environ.get("MICRO_FUZZ", "0"))
drawn = settings(
    max_examples=NUMBER or 300,
    derandomize=not NUMBER,
    database=None,
    deadline=20_000 if NUMBER else None,
    print_blob=bool(NUMBER),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

pytestmark = [pytest.mark.xdist_group("bad input"), pytest.mark.timeout(0 if NUMBER else 600)]


@pytest.fixture(scope="module", autouse=True)
def _files_of_hypothesis(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep them out of the folder in which commands are called."""
    set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The runs that a command would start, none of which is started, in an empty folder."""
    plan: list[TrainConfig] = []
    monkeypatch.setattr(one_run, "execute", lambda config: plan.append(config) is None)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return plan


@drawn
@given(given=words())
def test_any_settings_describe_a_run_or_are_refused_in_one_line(
    planned: list[TrainConfig], tmp_path: Path, given: Words
) -> None:
    planned.clear()
    called = call(["train", *given])
    assert os.listdir() == []
    if called.code == 0:
        assert planned
        assert called.err == ""
    else:
        assert called.code == 2, called
        assert re.fullmatch(r"error: [^\n]+\n", called.err), called.err
        assert len(called.err) < 3000
    for config in planned:
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert to_yaml(from_yaml(tmp_path / "config.yaml")) == to_yaml(config)
