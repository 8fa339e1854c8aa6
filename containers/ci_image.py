"""Build a small container image with an ID that is the same on every build: for CI, and for trying things out.

    python containers/ci_image.py OUT.tar [--ref REPO:TAG] [--from host|archive] [--program NAME]... [--add SRC:DEST]...

`docker load` of the result gives the ID that is printed; `docker build` and `docker import` never give one twice, since
they put the time into the image's configuration. From `host`: bash, busybox and Debian's python3 of this machine with
the libraries they need (1 s). From `archive`: a Debian by mmdebstrap, bit-identical for one state of the archive
(SOURCE_DATE_EPOCH is honoured, default 0; about 40 s). Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PYTHON = Path("/usr/bin/python3")  # Debian's own: an interpreter under /opt would not find its library in the image
SKIPPED = {"__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "distutils"}
FOLDERS = ("dev", "proc", "sys", "etc", "root", "run", "var/tmp", "usr/lib", "opt", "e2e/attempt", "e2e/agent")
FILES = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": b"root:x:0:\nnogroup:x:65534:\n",
}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PACKAGES = "python3,bash,busybox-static"
CHUNK_BYTES = 1 << 20


def main(argv: list[str]) -> int:
    """Build the archive, print the image's ID."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ref", default="nemo-rl-e2e/ci:latest")
    parser.add_argument("--from", dest="source", choices=("host", "archive"), default="host")
    parser.add_argument("--program", action="append", default=[], help="a further program of this machine (host only)")
    parser.add_argument("--add", action="append", default=[], metavar="SRC:DEST", help="a further tree")
    options = parser.parse_args(argv)
    trees = [(Path(source), destination) for source, _, destination in (item.partition(":") for item in options.add)]
    print(build(options.out, options.ref, source=options.source, programs=options.program, trees=trees))
    return 0


def build(
    out: Path,
    ref: str,
    *,
    source: str = "host",
    programs: Iterable[str] = (),
    trees: Iterable[tuple[Path, str]] = (),
) -> str:
    """Write a docker-archive to `out`; return the image ID that loading it gives.

    Raises FileNotFoundError for a missing program, subprocess.CalledProcessError where mmdebstrap fails.
    """
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        layer = Path(folder, "layer.tar")
        if source == "archive":
            debian(Path(folder, "debian.tar"), epoch)
            with tarfile.open(Path(folder, "debian.tar")) as base:
                write_layer(layer, contents(trees), epoch, base)
        else:
            content = _host_content(programs)
            content.update(contents(trees))
            write_layer(layer, content, epoch)
        with layer.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        identity, stream = archive([(digest, layer)], ref, epoch)
        part = Path(folder, "archive.tar")
        with part.open("wb") as file:
            file.writelines(stream)
        part.replace(out)
        return identity


def debian(out: Path, epoch: int, packages: str = PACKAGES) -> None:
    """Bootstrap a Debian; mmdebstrap keeps to SOURCE_DATE_EPOCH. The messages of a failure are in the exception."""
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    argv = [
        "mmdebstrap",
        "--variant=essential",
        "--mode=root",
        f"--include={packages}",
        *excluded,
        "bookworm",
        str(out),
    ]
    subprocess.run(
        argv, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch)},
    )  # fmt: skip


def _host_content(programs: Iterable[str]) -> dict[str, Path | str | bytes]:
    """Return name in the image -> source file, link target or bytes, for what runs the agent and shell scripts."""
    content: dict[str, Path | str | bytes] = dict(FILES)
    for name in ("/bin/busybox", "/bin/bash", str(PYTHON), *programs):
        found = shutil.which(name)
        if found is None:
            raise FileNotFoundError(f"{name} is not installed (apt-get install busybox-static bash python3)")
        _add_binary(content, Path(found))
    applets = subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if not {f"bin/{applet}", f"usr/bin/{applet}"} & set(content):
            content[f"bin/{applet}"] = "busybox"
    library = Path(f"/usr/lib/{PYTHON.resolve().name}")
    for folder, names, files in os.walk(library):
        names[:] = sorted(name for name in names if name not in SKIPPED and not name.startswith("config-"))
        for name in files:
            _add_binary(content, Path(folder, name))
    return content


def _add_binary(content: dict[str, Path | str | bytes], path: Path) -> None:
    """Add a file under its own name, the links on the way, and the shared libraries that it needs."""
    name = str(path)[1:]
    if path.is_symlink():
        content[name] = str(path.resolve())
        path = path.resolve()
        name = str(path)[1:]
    content[name] = path
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return
    output = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout
    for needed in re.findall(r"(/\S+) \(0x", output):
        content[os.path.normpath(needed)[1:]] = Path(needed).resolve()


def contents(trees: Iterable[tuple[Path, str]]) -> dict[str, Path | str | bytes]:
    """Return the files and links of folders, each under its destination."""
    content: dict[str, Path | str | bytes] = {}
    for top, destination in trees:
        for path in sorted(top.rglob("*")):
            name = f"{destination.strip('/')}/{path.relative_to(top)}"
            if path.is_symlink():
                content[name] = str(path.readlink())
            elif path.is_file() and "__pycache__" not in path.parts:
                content[name] = path
    return content


def write_layer(
    out: Path,
    content: Mapping[str, Path | str | bytes],
    epoch: int,
    base: tarfile.TarFile | None = None,
    folders: Iterable[str] = (*FOLDERS, "tmp"),
) -> None:
    """Write a file system: sorted, one time, numeric owners, modes reduced to readable and executable.

    `content` is name -> source file, link target or bytes (a program where its folder is called bin); `folders` are
    there also when empty.
    """
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as tar:
        present = set()
        for member in base or ():
            present.add(member.name.strip("./"))
            tar.addfile(member, base.extractfile(member) if base and member.isreg() else None)
        for folder in sorted(
            {parent for name in [*content, *(f"{f}/x" for f in folders)] for parent in _parents(name)}
        ):
            if folder not in present:
                tar.addfile(_member(folder, epoch, type=tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755))
        for name, what in sorted(content.items()):
            if isinstance(what, str):
                tar.addfile(_member(name, epoch, type=tarfile.SYMTYPE, linkname=what, mode=0o777))
            elif isinstance(what, bytes):
                mode = 0o755 if os.path.basename(os.path.dirname(name)) == "bin" else 0o644
                tar.addfile(_member(name, epoch, size=len(what), mode=mode), io.BytesIO(what))
            else:
                status = what.stat()
                mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                with what.open("rb") as file:
                    tar.addfile(_member(name, epoch, size=status.st_size, mode=mode), file)


def _parents(name: str) -> Iterator[str]:
    while name := os.path.dirname(name):
        yield name


def _member(name: str, epoch: int, **fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mtime, member.mode = epoch, 0o644
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def archive(
    layers: Sequence[tuple[str, Path | None]],
    ref: str,
    epoch: int,
    *,
    env: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> tuple[str, Iterator[bytes]]:
    """Return the ID of the image made of `layers`, lowest first, and the docker-archive that `docker load` reads.

    A layer is (SHA-256 of its tar, the file); without a file the engine must have it already, below the same layers.
    The configuration, and so the ID, depends on the arguments alone.
    """
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    variables = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})}
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": created,
        "config": {
            "Env": [f"{k}={v}" for k, v in variables.items()],
            "Cmd": ["/bin/bash"],
            "Labels": dict(labels or {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest, _ in layers]},
        "history": [{"created": created, "created_by": "nemo-rl-e2e containers/ci_image.py"}] * len(layers),
    }
    data = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    identity = hashlib.sha256(data).hexdigest()
    names = [f"{digest}/layer.tar" for digest, _ in layers]
    manifest = json.dumps([{"Config": f"{identity}.json", "RepoTags": [ref], "Layers": names}]).encode()

    def stream() -> Iterator[bytes]:
        yield from _framed(f"{identity}.json", data, epoch)
        yield from _framed("manifest.json", manifest, epoch)
        for name, (_, path) in zip(names, layers, strict=True):
            if path is not None:
                yield from _framed(name, path, epoch)
        yield bytes(2 * tarfile.BLOCKSIZE)

    return f"sha256:{identity}", stream()


def _framed(name: str, what: Path | bytes, epoch: int) -> Iterator[bytes]:
    """Yield one member of a tar: header, content, padding."""
    size = len(what) if isinstance(what, bytes) else what.stat().st_size
    yield _member(name, epoch, size=size).tobuf(tarfile.GNU_FORMAT)
    if isinstance(what, bytes):
        yield what
    else:
        with what.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    yield bytes(-size % tarfile.BLOCKSIZE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
