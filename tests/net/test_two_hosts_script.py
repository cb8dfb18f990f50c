"""The gallery's script that starts a training on two hosts of one machine, joined by a slow link."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs/gallery"
pytestmark = pytest.mark.xdist_group("hosts")


def namespaces_can_be_made() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
        return False
    link = "ip link add link1 type veth peer name link2"
    bucket = "tc qdisc add dev link1 root tbf rate 1mbit burst 9kb latency 9ms"
    trial = f"mount -t tmpfs tmpfs /run && {link} && {bucket}"
    words = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", trial]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.skipif(not namespaces_can_be_made(), reason="needs namespaces of users, iproute2 and util-linux")
def test_both_hosts_train_over_the_link_and_the_first_writes_its_steps(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    words = [GALLERY / "two_hosts.sh", "1gbit", GALLERY / "throttled.py", "micro", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in (tmp_path / "micro.csv").read_text().splitlines()]
    times, shares = zip(*((float(seconds), float(share)) for seconds, share in rows), strict=True)
    assert list(times) == sorted(times)
    assert all(0 <= share <= 1 for share in shares)
    assert "micro: " in done.stdout
