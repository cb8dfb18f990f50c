"""Networks as plain ``nn.Module``: `build` one by name, `names` lists them.

To add a model, add a file here with a function decorated by ``@register(kind)``; no list of files is needed.
"""

import importlib
import pkgutil

from models.registry import build, kind_of, names

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["build", "kind_of", "names"]
