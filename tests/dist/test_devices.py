"""Which GPU a rank takes, where torch says that it sees some: no machine of these tests has any."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from experiments.config import checks
from experiments.config.compose import compose_runs
from experiments.config.errors import UserError
from experiments.training.group import device_of_rank, start_group
from tests.dist.fresh_ranks import run_fresh
from tests.dist.rank_functions import Ended, train

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]

WORDS = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=256", "batch_size=8", "epochs=1"]
OWN, SHARED, BOTH, ONE_HAS_NONE = (["a"], ["b"]), (["a"], ["a"]), (["a", "b"], ["a", "b"]), (["a"], [])
ALONE = ["cuda:0", "cuda:0"]
TAKEN = {  # what two ranks of a host see, and the setting: the devices that they take, or words of the error
    "one each, auto": (OWN, "auto", ALONE),
    "one each, cuda": (OWN, "cuda", ALONE),
    "one each, cpu": (OWN, "cpu", ["cpu", "cpu"]),
    "both see two": (BOTH, "auto", ["cuda:0", "cuda:1"]),
    "two tasks that see two of their own": ((["a", "b"], ["c", "d"]), "cuda", ["cuda:0", "cuda:1"]),
    "one for both, auto": (SHARED, "auto", ["cpu", "cpu"]),
    "one for both, cuda": (SHARED, "cuda", "2 ranks have the same"),
    "one has none, auto": (ONE_HAS_NONE, "auto", ["cpu", "cpu"]),
    "one has none, cuda": (ONE_HAS_NONE, "cuda", "rank 1 sees none"),
}


@contextmanager
def gpus(*seen: list[str]) -> Iterator[None]:
    """Have this rank see the GPUs of its number."""
    own = seen[int(os.environ["RANK"])]
    with (
        patch.object(checks, "num_gpus", lambda: len(own)),
        patch.object(torch.cuda, "device_count", lambda: len(own)),
        patch.object(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=own[index], name="GPU")),
        patch.object(torch.cuda, "get_device_name", lambda index: "GPU"),
        patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        yield


def all_choices() -> dict[str, str]:
    store = next(dist.rendezvous("env://"))[0]
    found = {}
    for name, (seen, device, _) in TAKEN.items():
        try:
            with gpus(*seen):
                (config,) = compose_runs([[*WORDS, f"cluster.device={device}"]], joined_world_size=2)
                asked, option = config.cluster.device, "cluster.device=cuda"
                found[name] = str(device_of_rank(asked, dist.PrefixStore(name, store), option=option))
        except UserError as error:
            found[name] = str(error)
    store.set(f"over {os.environ['RANK']}", "")
    if os.environ["RANK"] == "0":  # it serves the store
        store.wait(["over 0", "over 1"])
    return found


def test_each_rank_takes_a_gpu_of_its_own_or_none_does() -> None:
    choices = run_fresh(2, all_choices)
    for name, (_, _, expected) in TAKEN.items():
        taken = [choice[name] for choice in choices]
        if isinstance(expected, list):
            assert taken == expected, name
        else:
            assert all("cluster.device=cuda" in error and expected in error for error in taken), (name, taken)


def begin() -> tuple[str, Any]:
    backends = []
    with gpus(*OWN), patch.object(dist, "init_process_group", lambda backend, **_: backends.append(backend)):
        (config,) = compose_runs([WORDS], joined_world_size=2)
        device, _ = start_group(config)
    return str(device), backends


def test_ranks_that_see_one_gpu_each_train_on_it() -> None:
    assert run_fresh(2, begin) == [("cuda:0", ["nccl"])] * 2


def train_with_one_gpu(words: list[str]) -> Ended:
    with gpus(*SHARED):
        return train(*words)


def test_ranks_that_share_a_gpu_are_refused_or_leave_it_with_a_note(tmp_path: Path) -> None:
    words = [*WORDS, f"output={tmp_path}"]
    for ended in run_fresh(2, train_with_one_gpu, [*words, "cluster.device=cuda"]):
        assert ended.returncode == 2, ended.stderr
        (line,) = ended.stderr.splitlines()
        assert line.startswith("error: cluster.device=cuda ")
    assert not list(tmp_path.iterdir())
    first, second = run_fresh(2, train_with_one_gpu, words)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert [line for line in first.stderr.splitlines() if "CPU" in line and "GPU" in line]
    assert second.stderr == ""
