"""Keeps the record of a run in its file while the run goes on. Knows files, and nothing of what a record holds."""

from __future__ import annotations

import logging
import shlex
import tempfile
from pathlib import Path

from forerun.bench.records.record import Record, RecordFile, load
from forerun.types import SettingError, require

LOG = logging.getLogger("forerun")


class Keeper:
    """Writes the record after each batch. If the file cannot be written, for instance on a full disk, the run goes on: writing
    is tried again after the next batch, and at the end in a folder for temporary files.

    trouble: why the last write failed, None if it did not.
    """

    def __init__(self, path: Path, replacing: bool = False) -> None:
        """replacing: the run is resumed from this file. Raises SettingError for a file that cannot be written, and for one that
        holds an unfinished run."""
        writable("output", path)
        remedy = f"the file holds an unfinished run; resume it with --resume {path}, or give another name"
        require(replacing or not _unfinished(path), "output", str(path), remedy)
        self.path = path
        self.trouble: str | None = None
        self._file = RecordFile(path)
        self._last: Record | None = None

    @property
    def saved(self) -> bool:
        """Whether there is a record."""
        return self._last is not None

    @property
    def resume(self) -> str:
        """The command that resumes the run."""
        return shlex.join(["forerun", "bench", "--resume", str(self.path)])

    def write(self, record: Record) -> None:
        self._last = record
        try:
            self._file.write(record)
            self.trouble = None
        except OSError as error:
            if self.trouble is None:
                LOG.warning("%s cannot be written (%s); the run goes on, and writing is tried again", self.path, error.strerror)
            self.trouble = str(error.strerror or error)

    def close(self) -> Path:
        """The file that holds the record in the end."""
        if self.trouble is None or self._last is None:
            return self.path
        path = Path(tempfile.mkdtemp(prefix="forerun-record-")) / self.path.name
        RecordFile(path).write(self._last)
        return path


def writable(setting: str, path: Path) -> None:
    """Raises SettingError for an output file that cannot be written, before any time is spent on measuring."""
    folder = path.resolve().parent
    require(folder.is_dir(), setting, str(path), "its folder does not exist; make it first or give another")
    require(not path.is_dir(), setting, str(path), "that is a folder; give the name of a file")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise SettingError(setting, str(path), f"it cannot be written ({error.strerror}); give another") from None


def _unfinished(path: Path) -> bool:
    """Whether the file holds a run that can be resumed."""
    try:
        found = load(path)
    except (OSError, SettingError):
        return False
    return bool(found.batches) and not found.finished and bool(found.settings.options)
