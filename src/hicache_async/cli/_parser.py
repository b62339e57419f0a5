"""What the command understands."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from . import cp, doctor, gc, ls, rm, stat, verify

_EPILOG = """\
STORE is the directory of a file store, or the URL of any store, as file:///data/kv, shm:name or
zstd+file:///data/kv.

exit status: 0 fine; 1 a problem was found; 2 wrong usage, or a store that cannot be opened or asked;
130 interrupted; 141 nobody reads the output any more. HICACHE_DEBUG=1 in the environment shows tracebacks.
"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hicache: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; what it parses has ``run``, a coroutine function of the options and an Output."""
    parser = _Parser(
        prog="hicache",
        description="Look after the stores of a KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for add in (_add_ls, _add_stat, _add_verify, _add_gc, _add_rm, _add_cp, _add_doctor):
        add(verbs)
    return parser


def _add_verb(verbs: argparse._SubParsersAction[_Parser], name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    verb.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bar")
    return verb


def _add_ls(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(verbs, "ls", "list the namespaces of a store, or its keys")
    verb.add_argument("store", metavar="STORE")
    verb.add_argument("--keys", action="store_true", help="list keys, one a line")
    verb.add_argument("--namespace", metavar="D", help="only this namespace, as ukv1-0123456789abcdef")
    verb.set_defaults(run=ls.run)


def _add_stat(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(verbs, "stat", "sum up what a store holds")
    verb.add_argument("store", metavar="STORE")
    verb.set_defaults(run=stat.run)


def _add_verify(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(verbs, "verify", "read and check every object of a store; exit 1 when one is bad")
    verb.add_argument("store", metavar="STORE")
    verb.add_argument("--namespace", metavar="D", help="only this namespace")
    verb.add_argument("--delete", action="store_true", help="delete what is bad; else nothing is changed")
    verb.add_argument("--jobs", metavar="N", type=_positive, default=4, help="reads at once; default: 4")
    verb.set_defaults(run=verify.run)


def _add_gc(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(verbs, "gc", "remove what nobody can use any more, and trim a store to its limits")
    verb.add_argument("store", metavar="STORE", help="limits may stand in the URL, as ?max_bytes=100GB")
    verb.add_argument(
        "--older-than",
        metavar="DURATION",
        type=_duration_s,
        help="delete what was not used for 30d, 12h, 90m, 5s",
    )
    verb.add_argument("--dry-run", action="store_true", help="delete nothing, say what would be")
    verb.set_defaults(run=gc.run)


def _add_rm(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(verbs, "rm", "delete the objects of namespaces, and their manifests")
    verb.add_argument("store", metavar="STORE")
    verb.add_argument(
        "--namespace", metavar="D", action="append", default=[], help="delete this one; may be repeated"
    )
    verb.add_argument("--all", action="store_true", help="delete every object of the store")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb.set_defaults(run=rm.run)


def _add_cp(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(verbs, "cp", "copy the objects of one store to another, except those that are there")
    verb.add_argument("source", metavar="SRC")
    verb.add_argument("target", metavar="DST")
    verb.add_argument(
        "--namespace", metavar="D", action="append", default=[], help="only this one; may be repeated"
    )
    verb.set_defaults(run=cp.run)


def _add_doctor(verbs: argparse._SubParsersAction[_Parser]) -> None:
    verb = _add_verb(
        verbs, "doctor", "say what of a store a config shares, and what to set where it shares nothing"
    )
    verb.add_argument("store", metavar="STORE", help="opened as the engine opens it, codecs included")
    verb.add_argument(
        "--config",
        metavar="C",
        required=True,
        help="a TOML or JSON file: the options of CacheConfig, and a table kv that describes the tensors",
    )
    verb.set_defaults(run=doctor.run)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number >= 1")
    return number


def _duration_s(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration; give a number and a unit, as 30d, 12h, 90m, 5s"
        )
    return float(match[1]) * _SECONDS[match[2]]
