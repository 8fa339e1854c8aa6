"""What is installed in an image: Debian's packages and Python distributions with their licences, as JSON.

    sbom.py [TOP [OUT]]     the distributions below TOP (default /), to OUT or stdout

Runs inside the image under any python3, standard library only. Every `*.dist-info` and `*.egg-info` counts,
whichever of the image's many environments it is in.
"""

import email.parser
import json
import os
import sys

SKIPPED = {"proc", "sys", "dev"}


def debian(path: str = "/var/lib/dpkg/status") -> list:
    """Return [name, version, architecture] of the installed packages."""
    found = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for entry in file.read().split("\n\n"):
                fields = dict(line.split(": ", 1) for line in entry.splitlines() if line[:1] != " " and ": " in line)
                if fields.get("Status", "").endswith(" installed"):
                    found.append([fields["Package"], fields.get("Version", ""), fields.get("Architecture", "")])
    except OSError:
        return []
    return sorted(found)


def licence(metadata: object) -> str:
    """Return what a distribution says of its licence: expression, classifiers, or the first line of the field."""
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    free = (metadata.get("License") or "").strip().splitlines()
    named = [c for c in classifiers if c != "OSI Approved"]
    return metadata.get("License-Expression") or " AND ".join(sorted(set(named))) or (free[0][:200] if free else "")


def python(top: str) -> list:
    """Return [name, version, licence, folder] of every distribution below `top`."""
    found = []
    for base, folders, _ in os.walk(top):
        if base == "/":
            folders[:] = [f for f in folders if f not in SKIPPED]
        for name in folders:
            path = os.path.join(base, name, "METADATA" if name.endswith(".dist-info") else "PKG-INFO")
            if name.endswith((".dist-info", ".egg-info")) and os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    metadata = email.parser.HeaderParser().parse(file)
                found.append([metadata.get("Name", "?"), metadata.get("Version", "?"), licence(metadata), base])
    return sorted(found)


if __name__ == "__main__":
    told = json.dumps({"debian": debian(), "python": python(sys.argv[1] if len(sys.argv) > 1 else "/")})
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8") as target:
            target.write(told)
    else:
        print(told)
