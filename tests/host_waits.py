"""How often a step of each method makes the host wait for a CUDA device, counted without one.

Run ``python -m tests.host_waits`` to write the table anew after a change to the counts.
"""

import argparse
import statistics
from collections import Counter
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

from experiments.config.builders import build_reducer
from experiments.config.compose import compose_run
from micro import kernels
from micro.comm import Comm
from micro.flat import Layout
from micro.thread_ranks import SimulatedGroup
from tests.fake_device import DEVICE, DeviceTensor, Way, fake_device
from tests.recorded_streams import recorded_streams

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results/published/host_waits.md"
METHODS = sorted(path.stem for path in (ROOT / "conf/sparsifier").glob("*.yaml"))
WORLD_SIZE, STEPS, COUNTED = 2, 9, 5
LAYOUT = Layout(("matrix", "vector", "last"), ((40, 50), (1500,), (500,)))
FIXED = ["density=0.05", "optimizer.momentum=0", f"cluster.nproc_per_node={WORLD_SIZE}"]
HEAD = f"""# What the host waits for

`python -m tests.host_waits`: every method takes {STEPS} steps on {WORLD_SIZE} simulated ranks, d = {LAYOUT.numel:,},
density 0.05, on tensors that say they are on a CUDA device and have their values on the CPU (`tests/fake_device.py`).
No device is needed. The work of Triton's kernels is done by torch here, so their own waits are not in the table. An
operation on tensors of two devices ends the step with an error; no method has one.

The counts are those of a step of rank 0, medians of the last {COUNTED}. A *read* waits for a number that the host
needs: a value, or a length that depends on the data (`nonzero`, a mask as an index, `unique`). A *write* waits until
the device has copied numbers of the host. Either way the host waits for all that was queued before. `timed=True` adds
none: times are events, which are waited for where a time is read. A test fails where a method waits more often than
its row says.

No sparse method reads at the end whether all gradients and their mean were finite: where they were not, the device
leaves the step without effect, and the host learns of it when the next step begins, which raises where it is to stop.
That holds for a loop that calls `reduce_`. Attached to DDP, FSDP or local steps the host reads it once more, after
backward for all buckets together, for it acts on it. Methods that send a whole vector read it once a step, with all
that the record needs: dense (`first_nonfinite`) and codes of all values before anything is applied, DeMo, FFT and
PowerSGD after the mean was written; where it does not count, what was sent is put back.

What else is read, and what for:

- `_received`, `_counted`: the counts of all ranks, which are the lengths of the next messages: 1 read is the least for
  a method that sends lists of their exact lengths, as MiCRO's exact form, ExDyna, Gaussian-k, SIDCo, RedSync and DGC
  do. They collect candidates into lists with room for twice as many as are wanted, whose lengths come with these
  counts, and collect again, exactly, where a list was full, which the record of the step says. The fitted threshold of
  a rank stays on its device. Per tensor, all counts are read together.
- `in_rows`: SAGE's and the hard threshold's lists, which travel before any host has read them, in rows with room for
  the longest list of the last step and a twentieth and 1.5 roots more, with their counts. What came, how many indices
  differ, which is the length of the all-reduce, and what the selector learns are one read. Where counts of the ranks
  are so unequal that rows would send half as much again as lists, lists of exact lengths travel, and two lengths are
  read. So it is per tensor, and in pieces.
- `distinct`: how many indices differ where all ranks choose as many and average the values of all ranks.
- `_summed_in_slots`: in DSA, how many entries came, how many sums the regions have, and the flags. Entries travel to
  the regions in slots, each with room for those that went the same way in the last step and a twentieth and 3 roots
  more.
- `gather_largest_unread`: the same in Ok-Topk, and whether k candidates were found, and whether a row of its last
  message was too short.
- Elsewhere `gather_header` and `Transport.add_up` read counts, the lengths of lists.

Rows and slots save a message and a read, and send some empty places: 3 to 7% of a step's bytes with 4,000 entries and
more of each of 2 and 4 ranks, up to a quarter with 200. Where one was too short, on any rank, all ranks send
lists of exact lengths once more, with the result of the CPU; the record says so (`overfull`), and there is twice the
extra room from then on, which falls again. On a CPU, and where indices or values are packed, lists have their exact
lengths. The first steps read more: what is known of no last step is read, and Ok-Topk also reads boundaries and a
histogram once in 64 steps, when its regions move.

- `Deft.select`: the norms of all pieces, from which the host derives how many each gives.
- Published fits (`above`, `moments`, `mean_and_deviation`, `fit`, `smallest_of_largest`, `_raised`, `where` and
  others): their authors' codes make numbers of the host at these places, and go on by them.

`micro_fixed` reads nothing: its lists have a fixed length, its threshold stays on the device. Nor do methods of which
all ranks choose as many (top-k and its kin with `gather`, gTop-k, CLT-k, random-k): a merged list has a place for each
entry of both, and those that they share leave places empty.
On a GPU with Triton's kernels, top-k
takes one read more, of the length of its candidates. Layers of more than 32,768 elements (`topk_layers`, `accordion`,
`deft`) are searched by a scan, which reads three times more: a guess of each layer's threshold that was too high is
seen by the host.

| method | reads | writes | reads in | writes in |
|---|---:|---:|---|---|
"""

Waits = Counter[tuple[Way, str]]


@cache
def _group() -> SimulatedGroup:
    return SimulatedGroup(WORLD_SIZE, shares=False)  # every rank waits as it would in a process of its own


def waits_of(method: str) -> Waits:
    """Return how often a step of rank 0 waits, by way and function of micro.

    Raises:
        RuntimeError: an operation mixes devices.
    """
    reducer = build_reducer(compose_run([f"sparsifier={method}", *FIXED]))

    def steps(comm: Comm) -> list[Waits]:
        comm.timed = False
        randomness = torch.Generator().manual_seed(comm.rank)
        found = []
        with torch.no_grad(), fake_device() as waits:
            reducer.prepare(comm, DEVICE)
            state = reducer.start(LAYOUT, torch.float32, DEVICE)
            for _ in range(STEPS):
                waits.seen.clear()
                comm.begin_step()
                reducer.reduce_(state, DeviceTensor(torch.randn(LAYOUT.numel, generator=randomness)), comm)
                found.append(Counter(waits.seen))
        return found

    no_kernels = patch.object(kernels, "on_gpu", lambda *_: False)  # they need a device with a memory of its own
    with no_kernels, recorded_streams():
        counted = _group().run(steps)[0][-COUNTED:]
    places = dict.fromkeys(place for step in counted for place in step)
    return Counter({place: statistics.median_low([step[place] for step in counted]) for place in places})


def totals(waits: Waits) -> tuple[int, int]:
    """Return the numbers of reads and of writes."""
    reads, writes = (sum(number for (way, _), number in waits.items() if way == kind) for kind in ("read", "write"))
    return reads, writes


def published() -> dict[str, tuple[int, int]]:
    """Return the reads and writes of each method in the published table."""
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): (int(row[2]), int(row[3])) for row in rows}


def row(method: str, waits: Waits) -> str:
    """Return a method's row of the table."""
    reads, writes = totals(waits)
    return f"| `{method}` | {reads} | {writes} | {_places(waits, 'read')} | {_places(waits, 'write')} |\n"


def _places(waits: Waits, kind: Way) -> str:
    found = [(place, number) for (way, place), number in waits.items() if way == kind and number]
    return ", ".join(f"{place}" + (f" {number}" if number > 1 else "") for place, number in found)


def main() -> None:
    """Write the table."""
    argparse.ArgumentParser(prog="python -m tests.host_waits", description=__doc__).parse_args()
    TABLE.write_text(HEAD + "".join(row(method, waits_of(method)) for method in METHODS))


if __name__ == "__main__":
    main()
