"""Networks as plain ``nn.Module``: `build` one by name, `names` lists them.

Adding a model means adding a file here whose function carries ``@register(kind)``; no list names the files.
"""

import importlib
import pkgutil

from models.registry import build, kind_of, names

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["build", "kind_of", "names"]
