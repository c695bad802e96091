#!/bin/bash
# Kills the sandbox's first process; the kernel then ends every process, mount, device and rule in it.
set -u; . "$(dirname "$(readlink -f "$0")")/env.sh"
init=$(cat "$RUN/init.pid" 2>/dev/null)
[ "$init" ] && kill -9 $init 2>/dev/null
for ((i = 0; i < 100; i++)); do kill -0 ${init:-0} 2>/dev/null && [ "$init" ] || break; sleep 0.1; done
for ((i = 0; i < 100; i++)); do
  left=
  for group in /sys/fs/cgroup/*$CGROUP; do
    [ -d $group ] && { find $group -depth -type d -exec rmdir {} + 2>/dev/null; [ -d $group ] && left=$group; }
  done
  [ "$left" ] || break
  sleep 0.2
done
rm -f "$RUN/init.pid"
[ -z "$left" ] || { echo "error: processes are left in $left"; exit 1; }
