"""Build a small container image with an ID that is the same on every build: for CI, and for trying things out.

    python containers/ci_image.py OUT.tar [--ref REPO:TAG] [--from host|archive] [--program NAME]... [--add SRC:DEST]...
                                  [--package NAME]... [--libraries-of FOLDER]...

`docker load` of the result gives the ID that is printed; `docker build` and `docker import` never give one twice, since
they put the time into the image's configuration. From `host`: bash, busybox and Debian's python3 of this machine with
the libraries they need (1 s). From `archive`: a Debian by mmdebstrap, bit-identical for one state of the archive
(SOURCE_DATE_EPOCH is honoured, default 0; about 40 s). Standard library only.

For rehearsals in a container, whose environment is mounted where it is on the host, the image brings the rest:

    python containers/ci_image.py OUT.tar --ref nemo-rl-e2e/rehearsal:latest --package git \
        --package make --package g++ --libraries-of build/cpu/venv
"""

from __future__ import annotations

import argparse
import contextlib
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
    from collections.abc import Iterable, Iterator

PYTHON = Path("/usr/bin/python3")  # Debian's own: an interpreter under /opt would not find its library in the image
SKIPPED = {"__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "distutils"}
UNUSED = ("/usr/share/", "/var/", "/etc/", "/usr/lib/python3")
FOLDERS = ("dev", "proc", "sys", "etc", "root", "run", "var/tmp", "usr/lib", "opt", "e2e/attempt", "e2e/agent")
FILES = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": b"root:x:0:\nnogroup:x:65534:\n",
}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PACKAGES = "python3,bash,busybox-static"


def main(argv: list[str]) -> int:
    """Build the archive, print the image's ID."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ref", default="nemo-rl-e2e/ci:latest")
    parser.add_argument("--from", dest="source", choices=("host", "archive"), default="host")
    parser.add_argument("--program", action="append", default=[], help="a further program of this machine (host only)")
    parser.add_argument("--add", action="append", default=[], metavar="SRC:DEST", help="a further tree")
    parser.add_argument(
        "--package", action="append", default=[], help="an installed Debian package, with what it needs"
    )
    parser.add_argument("--libraries-of", type=Path, action="append", default=[], help="of a venv that gets mounted")
    options = parser.parse_args(argv)
    trees = [(Path(source), destination) for source, _, destination in (item.partition(":") for item in options.add)]
    made = build(
        options.out, options.ref, source=options.source, programs=options.program, trees=trees,
        packages=options.package, mounted=options.libraries_of,
    )  # fmt: skip
    print(made)
    return 0


def build(
    out: Path,
    ref: str,
    *,
    source: str = "host",
    programs: Iterable[str] = (),
    trees: Iterable[tuple[Path, str]] = (),
    packages: Iterable[str] = (),
    mounted: Iterable[Path] = (),
) -> str:
    """Write a docker-archive to `out`; return the image ID that loading it gives.

    Raises FileNotFoundError for a missing program, subprocess.CalledProcessError where mmdebstrap fails.
    """
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        layer = Path(folder, "layer.tar")
        if source == "archive":
            _debian(Path(folder, "debian.tar"), epoch)
            content = _content(trees)
            with tarfile.open(Path(folder, "debian.tar")) as base:
                _write_layer(layer, content, epoch, base)
        else:
            content = _host_content(programs)
            content = _packages(packages) | _libraries(mounted) | content
            content.update(_content(trees))
            _write_layer(layer, content, epoch)
        return _write_archive(layer, out, ref, epoch)


def _debian(out: Path, epoch: int) -> None:
    """Bootstrap a Debian; mmdebstrap keeps to SOURCE_DATE_EPOCH."""
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    argv = [
        "mmdebstrap",
        "--variant=essential",
        "--mode=root",
        f"--include={PACKAGES}",
        *excluded,
        "bookworm",
        str(out),
    ]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch)})


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
    content.setdefault("usr/bin/env", "/bin/busybox")  # of every portable first line
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


def _packages(names: Iterable[str]) -> dict[str, Path | str | bytes]:
    """Return the files of installed Debian packages and of what they depend on; FileNotFoundError for an absent one."""
    listing = ["dpkg-query", "--show", "--showformat", "${Package}|${Depends},${Pre-Depends}\\n"]
    told = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    needs = {
        name: re.findall(r"[,|]\s*([a-z0-9][a-z0-9+.-]*)", f",{rest}")
        for name, _, rest in (line.partition("|") for line in told.splitlines())
    }
    todo, found = list(names), set[str]()
    if absent := [name for name in todo if name not in needs]:
        raise FileNotFoundError(f"{absent[0]} is not installed (apt-get install {absent[0]})")
    while todo:
        if (name := todo.pop()) not in found and name in needs:
            found.add(name)
            todo += needs[name]
    content: dict[str, Path | str | bytes] = {}
    if found:
        files = subprocess.run(["dpkg", "-L", *sorted(found)], capture_output=True, text=True, check=True).stdout
        for path in map(Path, sorted({line for line in files.splitlines() if line.startswith("/")})):
            if not str(path).startswith(UNUSED) and path.is_file():
                content[str(path)[1:]] = str(path.readlink()) if path.is_symlink() else path
    return content


def _libraries(folders: Iterable[Path]) -> dict[str, Path | str | bytes]:
    """Return this machine's shared libraries that binaries below `folders`, and the Pythons they lead to, need."""
    content: dict[str, Path | str | bytes] = {}
    tops = {top for folder in folders for top in (folder.resolve(), (folder / "bin/python").resolve().parents[1])}
    tops.discard(Path("/usr"))  # Debian's own, which is in the image anyway
    found = sorted(str(path) for top in tops for path in top.rglob("*.so*") if path.is_file())
    found += [str(top / "bin" / PYTHON.resolve().name) for top in sorted(tops)]
    for start in range(0, len(found), 100):
        argv = ["ldd", *found[start : start + 100]]
        output = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        for needed in re.findall(r"=> (/(?:usr/)?lib\S+) \(0x", output):
            content[os.path.normpath(needed)[1:]] = Path(needed).resolve()
    return content


def _content(trees: Iterable[tuple[Path, str]]) -> dict[str, Path | str | bytes]:
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


def _write_layer(
    out: Path, content: dict[str, Path | str | bytes], epoch: int, base: tarfile.TarFile | None = None
) -> None:
    """Write the root file system: sorted, one time, numeric owners, modes reduced to readable and executable."""
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as tar:
        present = set()
        for member in base or ():
            present.add(member.name.strip("./"))
            tar.addfile(member, base.extractfile(member) if base and member.isreg() else None)
        for folder in sorted(
            {parent for name in [*content, *(f"{f}/x" for f in (*FOLDERS, "tmp"))] for parent in _parents(name)}
        ):
            if folder not in present:
                tar.addfile(_member(folder, epoch, type=tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755))
        for name, what in sorted(content.items()):
            if isinstance(what, str):
                tar.addfile(_member(name, epoch, type=tarfile.SYMTYPE, linkname=what, mode=0o777))
            elif isinstance(what, bytes):
                tar.addfile(_member(name, epoch, size=len(what)), io.BytesIO(what))
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


def _write_archive(layer: Path, out: Path, ref: str, epoch: int) -> str:
    """Wrap one layer into a docker-archive whose configuration, and so whose ID, depends on the layer alone."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": created,
        "config": {"Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/bash"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created": created, "created_by": "nemo-rl-e2e containers/ci_image.py"}],
    }
    data = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    identity = hashlib.sha256(data).hexdigest()
    manifest = [{"Config": f"{identity}.json", "RepoTags": [ref], "Layers": [f"{digest}/layer.tar"]}]
    part = out.with_suffix(".part")
    try:
        with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as tar:
            tar.addfile(_member(f"{identity}.json", epoch, size=len(data)), io.BytesIO(data))
            with layer.open("rb") as file:
                tar.addfile(_member(f"{digest}/layer.tar", epoch, size=layer.stat().st_size), file)
            text = json.dumps(manifest).encode()
            tar.addfile(_member("manifest.json", epoch, size=len(text)), io.BytesIO(text))
        part.replace(out)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return f"sha256:{identity}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
