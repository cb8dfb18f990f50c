"""Add the command micro-train to an editable install alone: it runs the repository, which a wheel leaves out."""

import sys

from setuptools import setup

setup(
    entry_points={"console_scripts": ["micro-train = experiments.train:main"]} if "editable_wheel" in sys.argv else {}
)
