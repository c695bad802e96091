"""Pack folders as the layers of an image that `ctr images import` takes: no container engine needed."""

import argparse
import hashlib
import io
import json
import tarfile
from pathlib import Path

LEFT_OUT = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "dev",
    "proc",
    "sys",
)


def layer(out: Path, folder: Path, place: str) -> str:
    """Write `folder` as a layer in which it is `place`; return the layer's digest."""
    prefix = place.strip("/")

    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not prefix and any(member.name == path or member.name.startswith(path + "/") for path in LEFT_OUT):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as archive:
        parts = prefix.split("/") if prefix else []
        for depth in range(1, len(parts)):
            parent = tarfile.TarInfo("/".join(parts[:depth]))
            parent.type, parent.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(parent)
        for path in sorted(folder.iterdir()):
            archive.add(path, "/".join([*parts, path.name]), filter=of_root)
    with out.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("name", help="NAME:TAG")
    parser.add_argument("layers", nargs="+", help="FOLDER=PLACE")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--entrypoint")
    args = parser.parse_args()
    files = []
    for number, each in enumerate(args.layers):
        folder, place = each.split("=")
        path = args.out.with_suffix(f".{number}")
        files.append((path, layer(path, Path(folder), place)))
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": args.env, "Entrypoint": [args.entrypoint] if args.entrypoint else None},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for _, digest in files]},
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    layers = [f"{digest}/layer.tar" for _, digest in files]
    manifest = json.dumps([{"Config": name, "RepoTags": [args.name], "Layers": layers}]).encode()
    with tarfile.open(args.out, "w") as image:
        for member, content in ((name, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            image.addfile(info, io.BytesIO(content))
        for (path, _), inside in zip(files, layers, strict=True):
            image.add(path, inside)
            path.unlink()


if __name__ == "__main__":
    main()
