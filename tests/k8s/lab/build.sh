#!/bin/bash
# The programs, from Debian packages and Go modules at pinned versions. Ten minutes cold on two cores, seconds warm.
set -eu; . "$(dirname "$(readlink -f "$0")")/env.sh"
absent=()
for program in etcd containerd runc iptables conntrack debootstrap; do
  command -v $program >/dev/null || absent+=($program)
done
if [ ${#absent[@]} -gt 0 ]; then
  echo "installing ${PACKAGES[*]}: ${absent[*]} not found"
  # Their services are not started: the lab runs its own.
  RUNLEVEL=1 apt-get install -qy --no-install-recommends "${PACKAGES[@]}" >"$CACHE/apt.log" 2>&1 ||
    { tail -5 "$CACHE/apt.log"; echo "error: on Debian, as root: apt-get update && apt-get install ${PACKAGES[*]}"; exit 1; }
fi
command -v go >/dev/null || { echo "error: no go on PATH; Go 1.25 or newer builds Kubernetes and KubeRay"; exit 1; }
command -v kubectl >/dev/null || { echo "error: no kubectl on PATH"; exit 1; }

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
component=k8s.io/component-base/version
stamp="-X $component.gitVersion=v$KUBERNETES -X $component.gitMajor=1 -X $component.gitMinor=${KUBERNETES:2:2}"
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
  echo "building $program $KUBERNETES"
  (cd "$LAB/kube" && go build -p 2 -trimpath -ldflags "-s -w $stamp" -o "$BIN/" ./cmd/$program)
done
echo "building coredns, pause"
(cd "$LAB/coredns" && go build -p 2 -trimpath -ldflags '-s -w' -o "$BIN/coredns" .)
(cd "$LAB/pause" && go build -trimpath -ldflags '-s -w' -o "$BIN/pause" .)
# Built in the module's folder: `go install MODULE@VERSION` asks for the list of versions, which some proxies refuse.
echo "building KubeRay's operator $KUBERAY"
operator=$(go mod download -json github.com/ray-project/kuberay/ray-operator@v$KUBERAY | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
(cd "$operator" && go build -p 2 -trimpath -ldflags '-s -w' -o "$BIN/ray-operator" .)
echo "$operator" >"$CACHE/kuberay"
