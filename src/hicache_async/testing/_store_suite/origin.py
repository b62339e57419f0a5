"""Where a candidate's code is, so that another process can load it and open the store there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .checks import Missing

_LOADED_MAIN = "hicache_exam_main"


@dataclass(frozen=True, slots=True)
class Origin:
    """A function of a module, or a method of a class of it that is made without arguments.

    Attributes:
        module: its name.
        file: of the module, which need not be importable by its name.
        names: of the class, if any, and of the function.
        is_method: whether the last one is called on an instance of the one before.
    """

    module: str
    file: str
    names: tuple[str, ...]
    is_method: bool

    @classmethod
    def of(cls, call: Callable[..., object]) -> Origin:
        """Return where ``call`` is. Raises: Missing: another process cannot find it."""
        owner = type(call.__self__) if inspect.ismethod(call) else call
        names = (*owner.__qualname__.split("."), *((call.__name__,) if inspect.ismethod(call) else ()))
        file = inspect.getsourcefile(owner) if callable(owner) else None
        if file is None or any(name.startswith("<") for name in names):
            raise Missing(
                f"another process cannot find {'.'.join(names)}: make it a class or a function of a module"
            )
        return cls(owner.__module__, str(Path(file).resolve()), names, inspect.ismethod(call))

    def load(self) -> Callable[..., Any]:
        """Return it, in this process."""
        found: Any = self._load_module()
        *owners, name = self.names
        for owner in owners:
            found = getattr(found, owner)
        call: Callable[..., Any] = getattr(found() if self.is_method else found, name)
        return call

    def _load_module(self) -> ModuleType:
        if self.module != "__main__":
            try:
                module = importlib.import_module(self.module)
            except ImportError:
                pass  # a test module that is loaded by its path, as this one will be
            else:
                if module.__file__ is not None and Path(module.__file__).resolve() == Path(self.file):
                    return module
        name = _LOADED_MAIN if self.module == "__main__" else self.module
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
