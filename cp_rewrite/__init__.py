"""A torch.compile pass that makes a single-device model context-parallel over packed documents.

Names are loaded with the first one that is asked for: the command line answers without torch where it needs none.
"""

from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time `__getattr__` gives them
    from .public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if PathFinder.find_spec(f"{__name__}.{name}", __path__) is None:  # noqa: F405 of modules imports ask
        public = import_module(f"{__name__}.public")
        if name == "__all__" or name in public.__all__:
            globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(f"{__name__}.public").__all__})
