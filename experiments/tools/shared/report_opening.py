"""The first lines of a report: the command and its machine."""

import shlex
from collections.abc import Sequence

from experiments.runs.manifest import collect_manifest


def opening(title: str, module: str, arguments: Sequence[str], world_size: int) -> str:
    """Return the first lines of a report: what it is about, how it was made, where and with what."""
    command = shlex.join(["python", "-m", module, *arguments])
    facts = collect_manifest(seed=0, command=[command], world_size=world_size, data_checksums={}, extra={})
    names = ("python", "torch", "numba")
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in names if facts["versions"][name])
    cpu, revision = facts["cpu"], facts["git"]["revision"]
    code = f", revision {revision[:8]}{' with changes' if facts['git']['dirty'] else ''}" if revision else ""
    return f"# {title}\n\n`{command}` on {cpu['num_cores']} cores of {cpu['model']}, {versions}{code}.\n"
