#!/bin/bash
# The programs, from Debian packages and Go modules at pinned versions. Ten minutes cold on two cores, seconds warm.
# build.sh kube-apiserver: only that, and the definitions that it is to know; says in which folder, last.
set -eu; . "$(dirname "$(readlink -f "$0")")/env.sh"
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
[ $# -eq 0 ] || programs=("$@")
absent=()
if [ $# -eq 0 ]; then
  for program in etcd containerd runc iptables conntrack debootstrap; do
    command -v $program >/dev/null || absent+=($program)
  done
fi
if [ ${#absent[@]} -gt 0 ]; then
  echo "installing ${PACKAGES[*]}: ${absent[*]} not found"
  # Their services are not started: the lab runs its own.
  RUNLEVEL=1 apt-get install -qy --no-install-recommends "${PACKAGES[@]}" >"$CACHE/apt.log" 2>&1 ||
    { tail -5 "$CACHE/apt.log"; echo "error: on Debian, as root: apt-get update && apt-get install ${PACKAGES[*]}"; exit 1; }
fi
command -v go >/dev/null || { echo "error: no go on PATH; Go 1.25 or newer builds Kubernetes and KubeRay"; exit 1; }
command -v kubectl >/dev/null || { echo "error: no kubectl on PATH"; exit 1; }

# What has been built from the same sources is not looked at again.
sources=$({ go version; find "$LAB/env.sh" "$LAB/build.sh" "$LAB/kube" "$LAB/coredns" "$LAB/pause" -type f | sort | xargs cat; } | sha256sum)
stamp="$CACHE/built${1:+-$1}"
[ "$(cat "$stamp" 2>/dev/null)" = "$sources" ] && { echo "$CACHE"; exit; }

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
component=k8s.io/component-base/version
version="-X $component.gitVersion=v$KUBERNETES -X $component.gitMajor=1 -X $component.gitMinor=${KUBERNETES:2:2}"
for program in "${programs[@]}"; do
  echo "building $program $KUBERNETES"
  (cd "$LAB/kube" && go build -p 2 -trimpath -ldflags "-s -w $version" -o "$BIN/" ./cmd/$program)
done
# Built in the module's folder: `go install MODULE@VERSION` asks for the list of versions, which some proxies refuse.
module() { go mod download -json "github.com/$1" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'; }
operator=$(module ray-project/kuberay/ray-operator@v$KUBERAY)
if [ $# -eq 0 ]; then
  echo "building KubeRay's operator $KUBERAY, coredns, pause"
  (cd "$operator" && go build -p 2 -trimpath -ldflags '-s -w' -o "$BIN/ray-operator" .)
  (cd "$LAB/coredns" && go build -p 2 -trimpath -ldflags '-s -w' -o "$BIN/coredns" .)
  (cd "$LAB/pause" && go build -trimpath -ldflags '-s -w' -o "$BIN/pause" .)
fi
echo "$operator" >"$CACHE/kuberay"
# Definitions of what components make: by Prometheus' operator and by External Secrets'.
mkdir -p "$CACHE/definitions"
prometheus=$(module prometheus-operator/prometheus-operator@v$PROMETHEUS)/example/prometheus-operator-crd
secrets=$(module external-secrets/external-secrets@v$SECRETS)/config/crds/bases
install -m 644 "$prometheus"/monitoring.coreos.com_{podmonitors,prometheusrules}.yaml \
  "$secrets/external-secrets.io_externalsecrets.yaml" "$CACHE/definitions"
echo "$sources" >"$stamp"
echo "$CACHE"
