#!/bin/bash
# Starts the sandbox and waits until Kubernetes and KubeRay's operator are ready. NODE_OFF=1: without a node.
set -u; . "$(dirname "$(readlink -f "$0")")/env.sh"
if [ -e "$RUN/init.pid" ] && kill -0 "$(cat "$RUN/init.pid")" 2>/dev/null; then echo "error: up already; down.sh ends it"; exit 1; fi
rm -rf "$RUN"; mkdir -p "$RUN/logs"; bash "$LAB/pki.sh"
setsid unshare --net --mount --uts --pid --fork --kill-child --mount-proc --propagation private \
  bash "$LAB/inner.sh" </dev/null >"$RUN/unshare.log" 2>&1 &
outer=$!
for ((i = 0; i < 50; i++)); do
  inner=$(cat /proc/$outer/task/$outer/children 2>/dev/null); [ "$inner" ] && break; sleep 0.1
done
echo $inner >"$RUN/init.pid"
for ((i = 0; i < 1500; i++)); do
  [ -e "$RUN/ready" ] && break
  kill -0 $inner 2>/dev/null || break
  sleep 0.2
done
cat "$RUN/logs/inner.log"
[ -e "$RUN/ready" ] || { echo "error: the lab did not come up; logs: $RUN/logs"; exit 1; }
