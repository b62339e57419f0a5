"""Every exception of the library, in two levels and without logic.

A fault of a store, a disk or a peer never reaches a request: it becomes a shorter prefix.
What does reach a caller says which field or argument is wrong, its value, and what would be right.
"""


class HiCacheError(Exception):
    """Root of all errors raised on purpose by this library."""


class ConfigError(HiCacheError, ValueError):
    """A configuration value, a tensor or an argument that cannot work."""


class NamespaceError(ConfigError):
    """A shape of ranks or heads that would exchange bytes that are not interchangeable."""


class ClosedError(HiCacheError):
    """The cache was used after it was closed."""


class WrongLoopError(HiCacheError):
    """The cache was used from another event loop, from another thread, or in a forked child."""


class LeaseError(HiCacheError):
    """A lease was used out of order: a second load, a commit beyond what it holds, use after release."""


class CapacityError(HiCacheError):
    """No device page is left even after eviction: the engine has to preempt a request."""


class StoreError(HiCacheError):
    """A store could not do its work. It reaches no request; only ``admin.clear`` raises it."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or written for now."""


class CorruptObject(StoreError):
    """A stored object is not the bytes that were written under its key."""


class ConsensusError(HiCacheError):
    """A rank was lost: lengths agreed before can no longer be trusted."""


class InvariantError(HiCacheError, AssertionError):
    """A bug of this library: a page in two places, a count that does not close."""
