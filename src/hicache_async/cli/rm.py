"""``hicache rm``: deletes the objects of namespaces, and their manifests."""

from __future__ import annotations

import sys
from argparse import Namespace as Options

from ._inventory import keys_of
from ._opening import deleting_of, listing_of, opened
from ._output import Output, counted
from ._problem import FINE, FOUND, Problem
from .gc import delete_all


async def run(options: Options, output: Output) -> int:
    """Delete what ``options`` name, and nothing else; returns the exit status."""
    digests = _digests(options)
    async with opened(options.store, read_only=False, limited=False) as store:
        listing = listing_of(store, "rm lists the keys of a store")
        deleting_of(store, "rm deletes objects")
        keys = await keys_of(listing, digests)
        if not options.yes:
            what = "all namespaces, and of none" if options.all else ", ".join(digests)
            _confirm(f"delete {counted(len(keys), 'object')} of {what} from {options.store}")
        num_deleted = await delete_all(store, keys, output)
        left = len(await keys_of(listing, digests)) if options.all else 0
    document = {"store": options.store, "namespaces": digests, "objects": len(keys), "deleted": num_deleted}
    output.document(document, [f"{counted(num_deleted, 'object')} of {len(keys):,} deleted"])
    if left:
        output.note(f"{counted(left, 'object')} are there all the same: somebody writes; run it again")
    return FOUND if left else FINE


def _digests(options: Options) -> list[str]:
    # An empty name is mostly a variable of the shell that was never set.
    if options.all:
        if any(options.namespace):
            raise Problem("--all deletes every object; give it without --namespace")
        return []
    if not options.namespace:
        raise Problem(
            "rm deletes namespaces: give --namespace D, as hicache ls shows them, or --all for every object"
        )
    if not all(options.namespace):
        raise Problem("--namespace is empty; give a name as hicache ls shows it, or --all for every object")
    return list(options.namespace)


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise Problem(f"this would {what}; nobody can be asked here, so give --yes")
    sys.stderr.write(f"{what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Problem("nothing was deleted", FOUND)
