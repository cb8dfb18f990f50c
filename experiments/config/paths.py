"""The paths of the repository and of its configuration files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"  # the files of the configuration
