"""The command: exit statuses, streams, interrupts and progress, as a user of a terminal meets them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache
from tests.cli.stores import command, environment, fill, names, run

VERBS = ["ls", "stat", "verify", "gc", "rm", "cp", "doctor"]

WAITING = """
import asyncio, sys
from hicache_async import register_store
from hicache_async.cli import main

class Waiting:
    @classmethod
    def from_url(cls, url, **options):
        return cls()

    async def list_keys(self):
        print("waiting", flush=True)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            print("cancelled", flush=True)

    async def count_prefix(self, keys): ...
    async def read(self, keys, into, stop): ...
    async def write(self, keys, pages): ...

    async def aclose(self):
        print("closed", flush=True)

sys.modules["waiting"] = sys.modules["__main__"]
register_store("waiting", "waiting:Waiting")
sys.exit(main(["ls", "--keys", "waiting:"]))
"""


def test_every_verb_has_help() -> None:
    """The command and each of its verbs explain themselves, and name the exit statuses."""
    done = run("--help")
    assert done.returncode == 0 and "exit status: 0 fine" in done.stdout
    assert all(f"    {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb: str, hicache: Hicache) -> None:
    """Each verb tells its arguments."""
    ended = hicache(verb, "--help")
    assert ended.status == 0 and "--format {text,json}" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "VERB"),
        (["frobnicate"], "invalid choice"),
        (["ls"], "STORE"),
        (["ls", "full:a", "--format", "xml"], "invalid choice"),
        (["verify", "full:a", "--jobs", "0"], "'0' is no number >= 1"),
        (["doctor", "full:a"], "--config"),
        (["ls", "nowhere"], "there is no directory"),
        (["ls", __file__], "is not a directory"),
        (["ls", "what:ever"], "its scheme must be one of"),
        (["ls", "file://host/path"], "names a host"),
        (["ls", "broken:a"], "RuntimeError: the server is gone"),
    ],
)
def test_wrong_usage(hicache: Hicache, arguments: list[str], words: str) -> None:
    """The status is 2, nothing is on standard output, and one line says what is wrong."""
    ended = hicache(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert words in ended.err and ended.err.startswith("hicache: ") and ended.err.count("\n") == 1


def test_a_traceback_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, hicache: Hicache) -> None:
    """With HICACHE_DEBUG what a store raised comes out as it is."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="the server is gone"):
        hicache("ls", "broken:a")


def test_a_store_that_logs_leaves_the_output_alone(
    hicache: Hicache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output is for results: the document can be parsed whatever a store has to say."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"hicache-{os.getuid()}").mkdir(mode=0o700)
    ended = hicache("stat", "file:", "--format", "json")
    assert ended.status == 0 and ended.json["kind"] == "FileStore"


def test_paths_and_urls_mean_the_same(root: Path) -> None:
    """A relative path, an absolute one with odd characters, and a URL open the same store."""
    odd = root.parent / "k v%20#?ü"
    fill(f"file://{root}", (names(), 2))
    root.rename(odd)
    assert run("ls", "--keys", odd.name, cwd=odd.parent).stdout.count("\n") == 3
    assert run("ls", "--keys", str(odd)).stdout.count("\n") == 3


def test_an_interrupt_ends_it_cleanly() -> None:
    """Ctrl-C cancels what runs, closes the store, and ends with 130 and one line."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "cancelled\nclosed\n", "hicache: interrupted\n")


def test_a_reader_that_leaves_is_no_fault(root: Path) -> None:
    """When nobody reads any more it ends, as other tools do, without a word."""
    fill(f"file://{root}", (names(), 2000))
    process = subprocess.Popen(
        command("ls", "--keys", str(root)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(timeout=30) == 141
    assert error == b""


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_for_terminals(root: Path, shown: bool) -> None:
    """On a terminal there is a bar on standard error, unless it is not wanted; standard output stays clean."""
    fill(f"file://{root}", (names(), 5))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    try:
        done = subprocess.run(
            command("verify", str(root), "--format", "json", *([] if shown else ["--no-progress"])),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=50,
            check=True,
        )
        os.close(theirs)
        assert (b"checking" in read_all(ours)) is shown
    finally:
        os.close(ours)
    assert json.loads(done.stdout)["objects"] == 6


def read_all(descriptor: int) -> bytes:
    """Return what a terminal was shown, to the end."""
    found = b""
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # the other end is closed
            return found
        if not data:
            return found
        found += data


def test_no_progress_in_a_pipe(root: Path) -> None:
    """Where standard error is no terminal there is no bar at all."""
    fill(f"file://{root}", (names(), 5))
    assert run("verify", str(root)).stderr == ""


def test_it_starts_without_torch() -> None:
    """No verb waits for torch to be imported."""
    code = "import sys; from hicache_async.cli import main; main(['ls', 'memory:']); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, "")
