"""ObjectWriter: how objects come to the disk. Blocking, for threads; any number of them at once."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..._log import logger
from .._names import Place
from .._temp import TempFiles
from .object import Fault, encode_head, payload_offset, skip
from .options import FileOptions
from .quota import Quota

T = TypeVar("T")

_MAX_REMOVALS = 3
"""So often a directory may be swept away, being empty, between making and using it."""

_PRIVATE = 0o700
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_UNNAMED = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC


@dataclass(slots=True)
class Draft:
    """An object that is written and not yet published.

    Attributes:
        nbytes: of the whole file.
        quota: whose room it has reserved; None: nobody keeps books.
        temp: its temporary name; "" where it has none and ``fd`` holds it.
    """

    path: str
    nbytes: int
    quota: Quota | None = None
    temp: str = ""
    fd: int = -1


class ObjectWriter:
    """Write objects below one directory, each complete or not at all.

    Args:
        root: what is missing from it down is made with the modes of ``options``.
        objects: the directory of objects.
        quota: keeps the books; None: nobody does, for now.
    """

    def __init__(
        self, root: str, objects: str, options: FileOptions, temps: TempFiles, quota: Quota | None
    ) -> None:
        self.quota = quota
        self._root = root
        self._objects = objects
        self._options = options
        self._temps = temps
        self._durable = options.durability != "none"
        self._unnamed = options.unnamed_temp and self._can_be_unnamed()

    def draft(self, place: Place, payload: memoryview, spared: Container[str] = ()) -> Draft | Fault | None:
        """Write an object without publishing it. One that is there is only touched.

        Args:
            spared: paths of objects that do not make room for it.
        Returns: None: it is there; FULL: the limits leave no room for it.
        Raises: OSError: nothing is left of it.
        Ownership: the caller hands what it gets to :meth:`publish`.
        """
        path, offset = f"{self._objects}/{place.path}", payload_offset(place.key)
        nbytes = offset + payload.nbytes
        if self._is_there(path, nbytes):
            return None
        quota = self.quota
        if quota is not None and not self._reserve(quota, nbytes, spared):
            return Fault.FULL
        draft = Draft(path, nbytes, quota)
        try:
            self._fill(draft, encode_head(place.namespace, place.key, payload, offset), payload)
        except BaseException:
            self._drop(draft)
            raise
        return draft

    def publish(self, drafts: Sequence[Draft]) -> None:
        """Let readers see the drafts: first all data is synced, then all are named, then the directories synced.

        Where durability is "none" they are only named.
        Raises: OSError: of what was not published nothing is left.
        """
        waiting = list(reversed(drafts))
        try:
            if self._durable:
                _sync_data(drafts)
            while waiting:
                self._name(waiting[-1])
                waiting.pop()
        finally:
            for draft in waiting:
                self._drop(draft)
        if self._durable:
            for directory in {os.path.dirname(draft.path) for draft in drafts}:
                _sync_directory(directory)

    def remove(self, path: str, found: os.stat_result) -> None:
        """Remove the file that was ``found`` at ``path``, and never another that has taken its place.

        It is moved aside before it is looked at again, since between a look and an unlink the path may come
        to be a good object's. One that was moved by mistake is put back; if this process dies in between, a
        good object is lost.
        Raises: OSError: it cannot be removed.
        """
        if not os.path.samestat(found, os.lstat(path)):
            return
        with self._leaving(found):
            self._set_aside(path, found)

    def delete(self, path: str) -> bool:
        """Remove the object at ``path``; returns whether there was one.

        Raises: OSError: it cannot be removed.
        """
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode):
                return False
            with self._leaving(found):
                os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def _set_aside(self, path: str, found: os.stat_result) -> None:
        aside = self._temps.new()
        self._with_directory(aside, lambda: os.rename(path, aside))
        if not os.path.samestat(found, os.lstat(aside)):
            _rename_if_free(aside, path)
            raise FileNotFoundError(errno.ENOENT, "replaced by another while it was removed", path)
        os.unlink(aside)

    @contextlib.contextmanager
    def _leaving(self, found: os.stat_result) -> Iterator[None]:
        """Keep the books of a removal, which has failed where the block raises."""
        quota = self.quota
        if quota is None or not stat.S_ISREG(found.st_mode):
            yield
            return
        quota.release(found.st_size)
        try:
            yield
        except BaseException:
            quota.kept(found.st_size)
            raise
        quota.removed(found.st_size)

    def _reserve(self, quota: Quota, nbytes: int, spared: Container[str]) -> bool:
        return self._with_directory(f"{self._root}/v2/", lambda: quota.reserve(nbytes, spared))

    def _is_there(self, path: str, nbytes: int) -> bool:
        """Return whether a whole-looking object is there, and touch it; whatever else is there is removed."""
        try:
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode) and found.st_size == nbytes:
                _touch(path)
                return True
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            self.remove(path, found)
        except FileNotFoundError:
            pass
        return False

    def _fill(self, draft: Draft, head: bytes, payload: memoryview) -> None:
        options = self._options
        if self._unnamed:
            directory = self._temps.directory
            fd = self._with_directory(f"{directory}/", lambda: os.open(directory, _UNNAMED, options.mode))
            draft.fd = fd
        else:
            temp = draft.temp = self._temps.new()
            fd = self._with_directory(temp, lambda: os.open(temp, _NEW, options.mode))
        try:
            if options.gid >= 0:
                os.fchown(fd, -1, options.gid)
            # Whatever the umask is; only where it is wrong, as to set it is a write to the disk's journal.
            if stat.S_IMODE(os.fstat(fd).st_mode) != options.mode:
                os.fchmod(fd, options.mode)
            written = 0
            while written < draft.nbytes:
                written += os.writev(fd, skip((head, payload), written) if written else (head, payload))
        finally:
            if draft.temp:
                os.close(fd)

    def _name(self, draft: Draft) -> None:
        """Give a draft its name; one whose name is taken meanwhile has been stored by somebody else."""
        if draft.temp and draft.quota is None:
            self._with_directory(draft.path, lambda: os.rename(draft.temp, draft.path))
            return
        if draft.temp:
            named = self._with_directory(draft.path, lambda: _rename_if_free(draft.temp, draft.path))
        else:
            named = self._with_directory(draft.path, lambda: _link_unnamed(draft.fd, draft.path))
            os.close(draft.fd)
            draft.fd = -1
        if draft.quota is not None:
            draft.quota.commit(draft.nbytes) if named else draft.quota.abort(draft.nbytes)

    def _drop(self, draft: Draft) -> None:
        if draft.fd >= 0:
            os.close(draft.fd)
        if draft.temp:
            with contextlib.suppress(OSError):
                os.unlink(draft.temp)
        if draft.quota is not None:
            draft.quota.abort(draft.nbytes)

    def _can_be_unnamed(self) -> bool:
        temp = self._temps.new()
        try:
            directory = self._temps.directory
            fd = self._with_directory(temp, lambda: os.open(directory, _UNNAMED, self._options.mode))
            try:
                _link_unnamed(fd, temp)
            finally:
                os.close(fd)
            os.unlink(temp)
        except OSError as error:
            logger.info("store.unnamed_temp_refused", root=self._root, error=str(error))
            return False
        return True

    def _with_directory(self, path: str, action: Callable[[], T]) -> T:
        """Do ``action``, making the directory that ``path`` lies in where it is missing."""
        for _ in range(_MAX_REMOVALS):
            try:
                return action()
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):  # swept away, or replaced, as it was made
                    self._make_directory(os.path.dirname(path))
        return action()

    def _make_directory(self, path: str) -> None:
        """Make ``path`` and what is missing above it; from the root down with the mode and group of the store."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if len(path) < len(self._root):
            os.makedirs(path, exist_ok=True)
            return
        self._make_directory(parent)
        if self._options.directory_mode == _PRIVATE and self._options.gid < 0:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, _PRIVATE)
        else:
            self._make_shared_directory(path)
        if self._durable:
            _sync_directory(parent)

    def _make_shared_directory(self, path: str) -> None:
        new = f"{path}.{secrets.token_hex(4)}"  # nobody meets a directory that has not got its mode yet
        os.mkdir(new, _PRIVATE)
        try:
            os.chown(new, -1, self._options.gid)
            os.chmod(new, self._options.directory_mode)
            os.rename(new, path)
        except OSError:
            os.rmdir(new)
            if not os.path.isdir(path):
                raise


def _touch(path: str) -> None:
    try:
        os.utime(path)
    except FileNotFoundError:
        raise
    except OSError:
        pass  # another user's: it is there all the same


def _rename_if_free(source: str, target: str) -> bool:
    """Rename a file unless the target is there; returns whether it was renamed. The source is gone then."""
    try:
        os.link(source, target)
    except FileExistsError:
        os.unlink(source)
        return False
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        os.rename(source, target)
        return True
    with contextlib.suppress(OSError):
        os.unlink(source)
    return True


def _link_unnamed(fd: int, target: str) -> bool:
    """Name an open file unless the target is there; returns whether it was named."""
    try:
        # With src_dir_fd it is linkat() that follows the link; without, link(), which fails across file systems.
        os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def _sync_data(drafts: Sequence[Draft]) -> None:
    """Write the data of all drafts to the medium.

    The kernel is first told to begin with all of them: one by one it would wait for each.
    """
    if len(drafts) > 1:
        for draft in drafts:
            _with_file(draft, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
    for draft in drafts:
        _with_file(draft, os.fdatasync)


def _with_file(draft: Draft, action: Callable[[int], None]) -> None:
    # Opened again, as a batch may have more files than a process may have open.
    fd = draft.fd if draft.fd >= 0 else os.open(draft.temp, os.O_WRONLY | os.O_CLOEXEC)
    try:
        action(fd)
    finally:
        if fd != draft.fd:
            os.close(fd)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
