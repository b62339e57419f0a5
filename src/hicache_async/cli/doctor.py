"""``hicache doctor``: what of a store a config shares, and what to set where it shares nothing."""

from __future__ import annotations

import enum
from argparse import Namespace as Options
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..abc import Store
from ..core.codecs import codec_of
from ..core.keys import KeyNames
from ..core.manifest import Manifest, manifest_of
from ..core.sharing import Difference, differences, shown
from ._config import read_config
from ._inventory import Entry, take_inventory
from ._opening import opened
from ._output import Output, counted
from ._problem import FINE, FOUND, Problem
from .ls import fields_text


class Relation(enum.StrEnum):
    """What a namespace of the store is to the config."""

    OWN = "own"
    SAME_MODEL = "same_model"
    OTHER_MODEL = "other_model"
    UNKNOWN = "unknown"
    """Nothing is written down of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One namespace of the store, seen from the config."""

    entry: Entry
    relation: Relation
    different: tuple[Difference, ...] = ()

    @property
    def has_objects(self) -> bool:
        """Whether there is anything in it besides its manifest, as far as the store can tell."""
        return self.entry.num_objects != 0

    def rank(self) -> tuple[int, int, int, int, str]:
        """Return where it stands: what can be shared with the least change first, then what has the most objects."""
        never = sum(not difference.can_be_shared for difference in self.different)
        num_objects = self.entry.num_objects or 0
        place = list(Relation).index(self.relation)
        return place, never, len(self.different), -num_objects, self.entry.digest


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the store has for a config.

    Attributes:
        num_own: objects under the names of this very rank, or of what it needs; None: the store cannot tell.
        num_pages: pages of which all that it needs is there; None: as before.
    """

    names: KeyNames
    findings: Sequence[Finding]
    num_own: int | None
    num_pages: int | None

    @property
    def own(self) -> Manifest:
        """The config's own namespace."""
        return manifest_of(self.names.namespace)

    @property
    def shares(self) -> bool:
        """Whether a cache with this config finds anything."""
        if self.num_pages is not None:
            return self.num_pages > 0
        return any(finding.relation is Relation.OWN for finding in self.findings)


async def run(options: Options, output: Output) -> int:
    """Examine the store; returns the exit status."""
    examined = read_config(options.config)
    async with opened(options.store, read_only=True) as store:
        try:
            names = examined.names(codec_of(store))
        except ValueError as error:
            raise Problem(f"{options.config}: {error}") from error
        diagnosis = await _diagnose(store, names, output)
    document = {
        "store": options.store,
        "config": options.config,
        "namespace": diagnosis.own.digest,
        "fields": diagnosis.own.fields,
        "shares": diagnosis.shares,
        "own_objects": diagnosis.num_own,
        "own_pages": diagnosis.num_pages,
        "namespaces": [_as_dict(finding) for finding in diagnosis.findings],
    }
    output.document(document, _text(options, diagnosis))
    return FINE if diagnosis.shares else FOUND


async def _diagnose(store: Store, names: KeyNames, output: Output) -> Diagnosis:
    inventory = await take_inventory(store, output)
    own = manifest_of(names.namespace)
    findings = [_find(own, entry) for entry in inventory.entries if entry.digest]
    num_own = num_pages = None
    if inventory.keys is not None:
        chunks = Counter(_page_of(key, names) for key in inventory.keys if key.endswith(names.suffixes))
        num_own = chunks.total()
        num_pages = sum(count == names.num_chunks for count in chunks.values())
    return Diagnosis(names, sorted(findings, key=Finding.rank), num_own, num_pages)


def _page_of(key: str, names: KeyNames) -> str:
    return key.partition(f"_{names.namespace.digest}")[0]


def _find(own: Manifest, entry: Entry) -> Finding:
    if entry.digest == own.digest:
        return Finding(entry, Relation.OWN)
    if entry.manifest is None:
        return Finding(entry, Relation.UNKNOWN)
    is_same = entry.manifest.model_id == own.model_id
    relation = Relation.SAME_MODEL if is_same else Relation.OTHER_MODEL
    return Finding(entry, relation, differences(own, entry.manifest))


def _as_dict(finding: Finding) -> dict[str, object]:
    found = [
        {
            "field": each.field,
            "ours": each.ours,
            "theirs": each.theirs,
            "advice": each.advice,
            "can_be_shared": each.can_be_shared,
        }
        for each in finding.different
    ]
    return {**finding.entry.as_dict(), "relation": finding.relation, "differences": found}


# For people


def _text(options: Options, diagnosis: Diagnosis) -> Iterator[str]:
    own = diagnosis.own
    yield f"config  {options.config}: model_id {shown(own.model_id)}, namespace {own.digest}"
    yield f"store   {options.store}: {counted(len(diagnosis.findings), 'namespace')}"
    yield ""
    yield from _verdict(options, diagnosis)
    for finding in diagnosis.findings:
        yield ""
        yield finding.entry.headline()
        yield from _details(finding)


def _verdict(options: Options, diagnosis: Diagnosis) -> Iterator[str]:
    usable = [finding for finding in diagnosis.findings if finding.has_objects]
    near = [finding for finding in usable if finding.relation is Relation.SAME_MODEL]
    if diagnosis.shares:
        number = "" if diagnosis.num_pages is None else f": {counted(diagnosis.num_pages, 'page')}"
        yield f"SHARES  this config finds what is stored under its own names{number}"
        num_others = sum(finding.entry.num_objects or 0 for finding in near)
        if num_others:
            yield f"        and cannot find {counted(num_others, 'object')} of this model under others, as follows"
    elif diagnosis.num_own:
        yield "NO HITS no page is there with all that this config needs of it, only with some of its"
        yield f"        {diagnosis.names.num_chunks:,} objects: {diagnosis.num_own:,} in all; the other ranks"
        yield "        have to store theirs, too"
    elif any(finding.relation is Relation.OWN for finding in usable):
        yield "NO HITS the namespace is right, and all of it is of other ranks: no key ends as this config's do,"
        yield f"        in {diagnosis.names.suffix}; set tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size as"
        yield '        those that wrote it, or key_scheme = "unified" on both sides'
    elif near:
        yield "NO HITS the store has objects of this model, and none under this config's names. To share the most"
        most, near_digest = counted(near[0].entry.num_objects, "object"), near[0].entry.digest
        yield f"        of it, {near_digest} with {most}, in {options.config}:"
        yield from (f"        - {each.field}: {each.advice}" for each in near[0].different)
    elif usable:
        yield "NO HITS the store has nothing of this model_id that is written down, only what follows"
    else:
        yield "NO HITS the store is empty: nothing was stored yet, or all of it was evicted"


def _details(finding: Finding) -> Iterator[str]:
    if finding.relation is Relation.OWN:
        yield "    this config's own"
    elif finding.relation is Relation.UNKNOWN:
        yield from fields_text(finding.entry)
    elif finding.relation is Relation.OTHER_MODEL:
        model_id = None if finding.entry.manifest is None else finding.entry.manifest.model_id
        yield f"    another model: {shown(model_id)}"
    for each in finding.different if finding.relation is Relation.SAME_MODEL else ():
        yield f"    {each}"
        yield f"        {each.advice}"
