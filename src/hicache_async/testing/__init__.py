"""What tests of a cache, an engine or a store are made of; see docs/testing.md.

The exams of a store and of a device are here by name, and imported when first used: pytest loads a module of this
package in every project where the library is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_exam import check_device
    from .store_exam import Candidate, Damage, StoreReport, check_store, damage_file
    from .store_suite import StoreSuite

_HOME_OF = {
    "Candidate": "store_exam",
    "Damage": "store_exam",
    "StoreReport": "store_exam",
    "StoreSuite": "store_suite",
    "check_device": "device_exam",
    "check_store": "store_exam",
    "damage_file": "store_exam",
}


def __getattr__(name: str) -> object:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


__all__ = ["Candidate", "Damage", "StoreReport", "StoreSuite", "check_device", "check_store", "damage_file"]
