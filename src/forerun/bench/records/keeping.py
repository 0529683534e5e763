"""Where a run's record is kept while it is measured, so that nothing measured is lost. Knows files; not what is in a record."""

from __future__ import annotations

import logging
import shlex
import tempfile
from pathlib import Path

from forerun.bench.records.record import Record, RecordFile, load
from forerun.types import SettingError, require

LOG = logging.getLogger("forerun")


class Keeper:
    """Writes the record after each batch. A file that cannot be written, for instance on a full disk, does not end the run: it
    is tried again after the next batch, and at the end in the folder for temporary files.

    trouble: why it could not be written the last time, None if it could.
    """

    def __init__(self, path: Path, replacing: bool = False) -> None:
        """replacing: the file is the one that the run is resumed from. Raises SettingError for a file that cannot be written,
        and for one that holds a run which is not finished."""
        writable("output", path)
        if not replacing and _unfinished(path):
            raise SettingError(
                "output",
                str(path),
                f"it holds a run that is not finished; go on with it by --resume {path}, or give another name",
            )
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
        """The command that goes on with the run."""
        return shlex.join(["forerun", "bench", "--resume", str(self.path)])

    def write(self, record: Record) -> None:
        """The record as it is now."""
        self._last = record
        try:
            self._file.write(record)
            self.trouble = None
        except OSError as error:
            if self.trouble is None:
                LOG.warning("%s cannot be written (%s); the run goes on, and this is tried again", self.path, error.strerror)
            self.trouble = str(error.strerror or error)

    def close(self) -> Path:
        """Where the record is, in the end."""
        if self.trouble is None or self._last is None:
            return self.path
        folder = Path(tempfile.mkdtemp(prefix="forerun-record-"))
        RecordFile(folder / self.path.name).write(self._last)
        return folder / self.path.name


def writable(setting: str, path: Path) -> None:
    """Found out before minutes of measuring. Raises SettingError."""
    folder = path.resolve().parent
    require(folder.is_dir(), setting, str(path), "its folder does not exist; make it first or give another")
    require(not path.is_dir(), setting, str(path), "that is a folder; give a file's name")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise SettingError(setting, str(path), f"it cannot be written ({error.strerror}); give another") from None


def _unfinished(path: Path) -> bool:
    """Whether a file holds a run that can be resumed."""
    try:
        found = load(path)
    except (OSError, SettingError):
        return False
    return bool(found.batches) and not found.finished and bool(found.settings.options)
