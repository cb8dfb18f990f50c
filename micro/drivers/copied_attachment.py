"""What is left of an attachment in a copy of the object that holds it."""

from typing import NoReturn


class CopiedAttachment:
    """What copy, deepcopy and pickle make of an attachment: it is attached to no model, and says so."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"no '{name}': a copy of an attachment is attached to no model, call micro.attach on yours"
        )
