"""The ``hicache`` command: looks after stores from a terminal, verb first."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

import structlog

from ..errors import HiCacheError
from ._output import Output
from ._parser import build_parser
from ._problem import FINE, INTERRUPTED, NO_READER, UNUSABLE, Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    Args:
        arguments: those behind the name of the command; None: of this process.
    Returns: 0: fine; 1: it found a problem; 2: wrong usage, or a store that cannot be opened or asked; 130: it
        was interrupted; 141: nobody reads its output any more.
    """
    _open_streams()
    try:
        options = build_parser().parse_args(arguments)
        # Standard output is for what was asked for; what the stores log goes beside it.
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
        output = Output(as_json=options.format == "json", shows_progress=options.progress)
        status: int = asyncio.run(options.run(options, output))
        sys.stdout.flush()
        return status
    except SystemExit as end:  # of argparse, which has said why
        return end.code if isinstance(end.code, int) else FINE
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # What is left in the buffer would be written, and fail again, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except Problem as problem:
        return _say(str(problem), problem.status)
    except (HiCacheError, OSError) as error:
        return _say(str(error), UNUSABLE)
    except Exception as error:
        # Of a store made by others, or a bug of ours.
        if "HICACHE_DEBUG" in os.environ:
            raise
        return _say(f"{type(error).__name__}: {error}; HICACHE_DEBUG=1 shows where", UNUSABLE)


def _open_streams() -> None:
    """Let output that the caller has closed, as ``>&-`` does, go nowhere: there is no stream then at all."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()


def _nowhere() -> TextIO:
    # Its descriptor is that of the stream, which else a store's file would get; it is open until the process ends.
    return open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _say(text: str, status: int) -> int:
    sys.stderr.write(f"hicache: {text}\n")
    return status
