# What the lab's scripts share. $CACHE holds whatever it makes, $RUN what belongs to one run.
LAB=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
CACHE=${HANDOFF_K8S_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/handoff/k8s}
BIN=$CACHE/bin
IMAGES=$CACHE/images
RUN=$CACHE/run           # keys, kubeconfigs, logs, etcd's and the kubelet's data: made anew by up.sh
CONTAINERD=$CACHE/containerd # kept, so that images are imported once
KUBERNETES=1.34.4
KUBERAY=1.6.1
PROMETHEUS=0.85.0          # its operator
SECRETS=0.20.4             # External Secrets' operator
NODE=lab
NODE_IP=10.98.0.1        # on lo of the private network namespace
DNS_IP=$NODE_IP
SERVICES=10.96.0.0/16
PODS=10.244.0.0/24
CGROUP=/handoff-k8s      # parent of all pods, in every hierarchy
PACKAGES=(etcd-server containerd runc containernetworking-plugins iptables nftables conntrack debootstrap iproute2)
mkdir -p "$BIN" "$IMAGES"
