#!/bin/bash
# An image of Debian with Python 3.11 and the commands `ray` and `handoff`, whose
# packages and sources pods mount from the machine, read-only. Two minutes cold.
set -eu; . "$(dirname "$(readlink -f "$0")")/env.sh"
ROOT=$CACHE/rootfs
if [ ! -e "$ROOT/.complete" ]; then
  echo "making Debian's base"
  rm -rf "$ROOT"
  debootstrap --variant=minbase --include=python3.11,libpython3.11,wget,procps,iproute2,ca-certificates,libnuma1,libgomp1 \
    bookworm "$ROOT" >"$CACHE/debootstrap.log" 2>&1 || { tail -5 "$CACHE/debootstrap.log"; exit 1; }
  touch "$ROOT/.complete"
fi
install -d -o 1000 -g 1000 "$CACHE/vllm"
V=$CACHE/venv
if [ ! -e "$IMAGES/handoff.tar" ] || [ "$0" -nt "$IMAGES/handoff.tar" ]; then
  echo "making the image"
  rm -rf "$V"; mkdir -p "$V/bin" "$V/lib/python3.11/site-packages"
  ln -s /usr/bin/python3.11 "$V/bin/python"
  ln -s python "$V/bin/python3"
  printf 'home = /usr/bin\nversion = 3.11\n' >"$V/pyvenv.cfg"
  printf '/mnt/packages\n/mnt/project\n' >"$V/lib/python3.11/site-packages/mounted.pth"
  for command in ray:ray.scripts.scripts handoff:handoff.cli; do
    printf '#!/opt/venv/bin/python\nfrom %s import main\n\nmain()\n' "${command#*:}" >"$V/bin/${command%%:*}"
    chmod 755 "$V/bin/${command%%:*}"
  done
  grep -q '^handoff:' "$ROOT/etc/passwd" || echo 'handoff:x:1000:1000::/home/handoff:/bin/bash' >>"$ROOT/etc/passwd"
  mkdir -p "$ROOT/mnt/packages" "$ROOT/mnt/project" "$ROOT/home/handoff" "$ROOT/models"
  python3 "$LAB/archive.py" "$IMAGES/handoff.tar" handoff.test/handoff:1-cpu \
    --env PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin --env LANG=C.UTF-8 \
    "$ROOT=/" "$V=/opt/venv"
  mkdir -p "$CACHE/pause"; cp "$BIN/pause" "$CACHE/pause/pause"
  python3 "$LAB/archive.py" "$IMAGES/pause.tar" handoff.test/pause:1 --entrypoint /pause "$CACHE/pause=/"
fi
