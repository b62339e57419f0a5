"""ObjectDirectory: the objects of one directory. Blocking, for threads; any number of them at once."""

from __future__ import annotations

import contextlib
import os
import stat
import threading

from .._log import logger
from ._names import key_bytes, key_of_name, object_name
from ._object import Fault, decode_head, read_object, write_object
from ._temp import TempFiles

_MAX_LISTED_HEAD = 1 << 16  # bytes; no key in use comes near


class ObjectDirectory:
    """Read, write and find objects below ``root``; the first thread to come makes it ready.

    Under ``root`` there are ``v1/objects/xx/name.kv`` and ``v1/temp``: another version of the format
    is another directory, so that two versions never take each other's objects for damaged.

    Args:
        root: an absolute path; may be absent, unwritable or no directory, which is found out at use.
        private: whether ``root`` lies where other users can write, and must be this user's alone.
    """

    def __init__(self, root: str, private: bool = False) -> None:
        self.root = root
        self._private = private
        self._objects = f"{root}/v1/objects"
        self._lock = threading.Lock()
        self._temps: TempFiles | None = None

    def _ready(self) -> TempFiles:
        """Return where to build files, after looking at the directory once.

        Raises: OSError: a private directory that another user can reach; looked at again next time.
        """
        if self._temps is None:
            with self._lock:
                if self._temps is None:
                    self._temps = self._make_ready()
        return self._temps

    def _make_ready(self) -> TempFiles:
        if self._private:
            _claim_private(self.root)
        temps = TempFiles(f"{self.root}/v1/temp")
        num_files = temps.sweep()
        if num_files:
            logger.info("store.temp_swept", root=self.root, num_files=num_files)
        return temps

    def _path(self, raw_key: bytes) -> str:
        return f"{self._objects}/{object_name(raw_key)}"

    def has(self, key: str) -> bool:
        """Return whether a readable object is there; its content is verified when it is read."""
        try:
            self._ready()
        except OSError:
            return False
        return os.access(self._path(key_bytes(key)), os.R_OK)

    def read(self, key: str, into: memoryview) -> Fault | None:
        """Fill ``into``; returns None, or why its content is not to be used."""
        try:
            self._ready()
        except OSError:
            return Fault.UNREADABLE
        raw_key = key_bytes(key)
        return read_object(self._path(raw_key), raw_key, into)

    def write(self, key: str, payload: memoryview) -> None:
        """Publish ``payload`` under ``key``, or touch the object that is there.

        Raises: OSError.
        """
        temp = self._ready().new()
        raw_key = key_bytes(key)
        write_object(self._path(raw_key), temp, raw_key, payload)

    def delete(self, key: str) -> bool:
        """Remove an object; returns whether there was one.

        Raises: OSError.
        """
        self._ready()
        try:
            os.unlink(self._path(key_bytes(key)))
        except FileNotFoundError:
            return False
        return True

    def list_keys(self) -> list[str]:
        """Return the key of every object; what cannot be listed is left out."""
        keys = []
        for shard in _names_in(self._objects):
            for name in _names_in(f"{self._objects}/{shard}"):
                key = key_of_name(name)
                if key is None:
                    key = _key_in_head(f"{self._objects}/{shard}/{name}")
                if key is not None and object_name(key_bytes(key)) == f"{shard}/{name}":
                    keys.append(key)
        return keys


def _names_in(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _key_in_head(path: str) -> str | None:
    """Return the key that a file says it holds: a long key is in no file name."""
    try:
        with open(path, "rb") as file:
            header = decode_head(file.read(_MAX_LISTED_HEAD))
        return None if header is None else header.key.decode("utf-8", "surrogatepass")
    except (OSError, UnicodeError):
        return None


def _claim_private(root: str) -> None:
    """Make ``root`` with mode 0700, or check that it is a directory of this user that no other can enter."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, 0o700)
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{root} must be a directory of user {os.geteuid()} with mode 0700;"
            f" it belongs to {found.st_uid} and has mode {stat.filemode(found.st_mode)}"
        )
