"""A conversation over a long document whose KV cache comes back from device, host and disk.

Six turns of one conversation, each under harder conditions. After each, an engine without a cache
takes the same turn: it must give the same answer, token for token, and shows what recomputing costs.

    python examples/chat.py [--format json]
"""

from __future__ import annotations

import os

# The threads of a forward sleep between its layers' steps. By default they spin, which on a machine
# that has other things to do as well made everything several times slower. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import smollm2
import structlog
from llama import Llama
from paged_engine import Answer, PagedEngine, PagedKV
from tokenizers import Tokenizer
from tqdm import tqdm

from hicache_async import Books, CacheConfig, HiCache, Tier

PAGE_SIZE = 64
DEVICE_PAGES = 58  # hardly more than the whole conversation takes
DOCUMENT = topics["compound"]  # what Python's own manual says about if, for, try, with ...
DOCUMENT_TOKENS = 3_000
OTHERS = topics["specialnames"]  # what other people talk about meanwhile
QUESTIONS = {
    "cold": "What is this text about?",
    "next turn": "What does the with statement do?",
    "host": "When is a finally clause executed?",
    "store": "How does one loop over a sequence?",
    "restart": "How is an exception caught?",
    "damaged": "What is an if statement for?",
}

Ask = Callable[[str, list[int]], Awaitable[Answer]]
"""(name of the turn, prompt) -> answer"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One turn: how it went with the cache, and how without."""

    name: str
    answer: Answer
    recomputed: Answer
    reusable_tokens: int
    """Whole pages of the prompt before."""

    @property
    def identical(self) -> bool:
        """Whether both engines said the same."""
        return self.answer.tokens == self.recomputed.tokens

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came than by recomputing."""
        return self.recomputed.ttft_s / self.answer.ttft_s

    @property
    def is_what_it_claims(self) -> bool:
        """Whether the prefix came from where the name of the row says."""
        books, whole = self.answer.books, self.reusable_tokens
        by_tier = books.device, books.host, books.store
        if self.name == "damaged":  # only what lies before the damaged page
            return by_tier[:2] == (0, 0) and 0 < books.store < whole
        return by_tier == {
            "cold": (0, 0, 0),
            "next turn": (whole, 0, 0),
            "host": (0, whole, 0),
            "store": (0, 0, whole),
            "restart": (0, 0, whole),
        }.get(self.name)


class Conversation:
    """Asks the questions, each behind all that was said before, with a cache and without."""

    def __init__(self, tokenizer: Tokenizer, recompute: PagedEngine, say: Callable[[str], None]) -> None:
        self.rows: list[Row] = []
        self._tokenizer = tokenizer
        self._recompute = recompute
        self._say = say
        self._prompt: list[int] = []

    async def turn(self, name: str, ask: Ask) -> None:
        """Ask the next question."""
        question = QUESTIONS[name]
        reusable_tokens = len(self._prompt) // PAGE_SIZE * PAGE_SIZE
        self._prompt = self._next_prompt(question)
        answer = await ask(name, self._prompt)
        with progress(self._recompute, f"{name}, recomputing", len(self._prompt)):
            recomputed = await self._recompute.generate(name, self._prompt)
        self.rows.append(Row(name, answer, recomputed, reusable_tokens))
        self._say(f"> {question}\n{self._tokenizer.decode(answer.tokens).strip()} ...")
        self._say(
            f"[{name}: {answer.ttft_s:.2f} s to the first token, {recomputed.ttft_s:.2f} s recomputing]\n"
        )

    def _next_prompt(self, question: str) -> list[int]:
        encode = self._tokenizer.encode
        if not self.rows:
            document = self._tokenizer.decode(encode(DOCUMENT).ids[:DOCUMENT_TOKENS])
            return encode(smollm2.first_turn(f"{document}\n\n{question}")).ids
        return self._prompt + self.rows[-1].answer.tokens + encode(smollm2.next_turn(question)).ids


async def converse(model: Llama, tokenizer: Tokenizer, say: Callable[[str], None]) -> list[Row]:
    """Hold the whole conversation; returns a row for each turn."""
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as directory:
        async with open_engine(model, tokenizer, None) as recompute:
            conversation = Conversation(tokenizer, recompute, say)
            async with open_engine(model, tokenizer, directory) as engine:
                ask = with_progress(engine)
                await conversation.turn("cold", with_progress(engine, DOCUMENT_TOKENS))
                await engine.cache.admin.flush()
                stored = stored_pages(directory)
                await conversation.turn("next turn", ask)
                await push_out(engine, tokenizer, Tier.DEVICE)
                await conversation.turn("host", ask)
                await push_out(engine, tokenizer, Tier.HOST)
                await conversation.turn("store", ask)
            await conversation.turn("restart", partial(ask_new_process, directory))
            damage(stored[len(stored) // 2])
            async with open_engine(model, tokenizer, directory) as engine:
                await conversation.turn("damaged", with_progress(engine, DOCUMENT_TOKENS // 2))
    return conversation.rows


@contextlib.asynccontextmanager
async def open_engine(
    model: Llama, tokenizer: Tokenizer, directory: str | None
) -> AsyncIterator[PagedEngine]:
    """Open an engine over a cache whose store is ``directory``; None: an engine that reuses nothing."""
    reuse = directory is not None
    config = CacheConfig(
        model_id=smollm2.MODEL_ID,
        fingerprint="fp32",
        page_size=PAGE_SIZE,
        host_ratio=2.0 if reuse else 0.1,
        host_reserve_bytes=256 << 20,
        allow_small_host=not reuse,
        write_policy="write_through",  # a page goes to all tiers when it is first committed
        prefetch_policy="wait_complete",  # the rows show where pages are, so none may come too late
    )
    kv = PagedKV(model.config, DEVICE_PAGES, PAGE_SIZE)
    stop_token = tokenizer.token_to_id(smollm2.END_OF_TURN)
    async with (
        HiCache.open(config, kv=kv.device_kv(), store=f"file://{directory}" if reuse else None) as cache,
        PagedEngine(model, kv, cache, stop_token=stop_token, reuse=reuse) as engine,
    ):
        yield engine


async def push_out(engine: PagedEngine, tokenizer: Tokenizer, tier: Tier) -> None:
    """Let other people talk until they have filled ``tier`` once: nothing older is left in it."""
    stats = engine.cache.stats()
    num_pages = (stats.device if tier is Tier.DEVICE else stats.host).capacity
    pages_each, at_once = 8, 6
    length = pages_each * PAGE_SIZE + 1  # one more, for the last token of a prompt is always computed
    tokens = tokenizer.encode(OTHERS).ids
    prompts = [tokens[start:][:length] for start in range(0, num_pages * PAGE_SIZE, pages_each * PAGE_SIZE)]
    with progress(engine, f"others fill the {tier}", num_pages * PAGE_SIZE):
        for first in range(0, len(prompts), at_once):
            await asyncio.gather(
                *(
                    engine.generate(f"other {first + i}", prompt, max_tokens=1)
                    for i, prompt in enumerate(prompts[first : first + at_once])
                )
            )


def with_progress(engine: PagedEngine, num_tokens: int | None = None) -> Ask:
    """Return what asks ``engine`` and shows how many tokens it computes, of about ``num_tokens``."""

    async def ask(name: str, prompt: list[int]) -> Answer:
        with progress(engine, name, num_tokens):
            return await engine.generate(name, prompt)

    return ask


@contextlib.contextmanager
def progress(engine: PagedEngine, what: str, num_tokens: int | None) -> Iterator[None]:
    """Show a bar of the tokens that ``engine`` computes."""
    with tqdm(total=num_tokens, desc=what, unit="token", leave=False) as bar:
        engine.on_computed = bar.update
        yield


async def ask_new_process(directory: str, name: str, prompt: list[int]) -> Answer:
    """Run this file once more, to answer ``prompt`` with what is in ``directory`` and nothing else."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--answer-from", directory, stdin=PIPE, stdout=PIPE
    )
    try:
        output, _ = await process.communicate(json.dumps([name, prompt]).encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the new process failed with exit code {process.returncode}")
    answer = json.loads(output)
    return Answer(answer["tokens"], answer["ttft_s"], Books(**answer["books"]))


async def answer_from(directory: str) -> None:
    """Be that process: a prompt comes in on stdin, its answer goes out on stdout."""
    name, prompt = json.load(sys.stdin)
    model, tokenizer = smollm2.load()
    async with open_engine(model, tokenizer, directory) as engine:
        answer = await with_progress(engine)(name, prompt)
    print(json.dumps(dataclasses.asdict(answer)))


def stored_pages(directory: str) -> list[Path]:
    """Return the files of all stored pages, oldest first: a prompt is written from its start."""
    return sorted(Path(directory).rglob("*.kv"), key=lambda page: page.stat().st_mtime_ns)


def damage(page: Path) -> None:
    """Change one byte in the middle of a stored page."""
    content = bytearray(page.read_bytes())
    content[len(content) // 2] ^= 0xFF
    page.write_bytes(content)


def table(rows: list[Row]) -> str:
    """Return what a person reads."""
    lines = [
        f"{'':10}{'tokens of the prompt, from':>44}{'first token':>24}",
        f"{'':10}{'device':>11}{'host':>11}{'store':>11}{'computed':>11}{'after':>10}{'recomputing':>14}{'ratio':>10}",
    ]
    for row in rows:
        books = row.answer.books
        lines.append(
            f"{row.name:10}{books.device:11,}{books.host:11,}{books.store:11,}{books.computed:11,}"
            f"{row.answer.ttft_s:8.2f} s{row.recomputed.ttft_s:12.2f} s{row.speedup:8.1f} x"
        )
    return "\n".join(lines)


def as_json(rows: list[Row]) -> dict[str, object]:
    """Return what a program reads."""
    return {
        "rows": [
            {
                "name": row.name,
                "device_tokens": row.answer.books.device,
                "host_tokens": row.answer.books.host,
                "store_tokens": row.answer.books.store,
                "computed_tokens": row.answer.books.computed,
                "ttft_s": row.answer.ttft_s,
                "identical": row.identical,
            }
            for row in rows
        ],
        "identical": all(row.identical for row in rows),
        "speedup_after_restart": speedup_after_restart(rows),
    }


def speedup_after_restart(rows: list[Row]) -> float:
    """Return how many times sooner the first token of a restarted engine came than by recomputing."""
    return next(row.speedup for row in rows if row.name == "restart")


def main() -> int:
    """Run the demo; returns 0 when every answer is right and came from where it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--answer-from", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(  # stdout is for results
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if options.answer_from:
        asyncio.run(answer_from(options.answer_from))
        return 0
    say = print if options.format == "text" else partial(print, file=sys.stderr)
    model, tokenizer = smollm2.load()
    rows = asyncio.run(converse(model, tokenizer, say))
    wrong = [row.name for row in rows if not row.is_what_it_claims]
    if wrong:
        print(f"not what they claim to be: {', '.join(wrong)}", file=sys.stderr)
    identical = all(row.identical for row in rows)
    say(table(rows) + "\n")
    if options.format == "json":
        print(json.dumps(as_json(rows)))
    else:
        print(f"identical answers: {'yes' if identical else 'no'}")
        print(f"speed-up after restart: {speedup_after_restart(rows):.1f} x")
    return 0 if identical and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
