#!/bin/bash
# The sandbox's first process (network, mounts, processes and host name of its own): brings everything up, then waits.
set -u; . "$(dirname "$(readlink -f "$0")")/env.sh"
B=$BIN; P=$RUN/pki; L=$RUN/logs; STATE=$RUN/state; mkdir -p "$STATE"
exec >$L/inner.log 2>&1
T0=$(date +%s.%N); say() { printf '%7.2f %s\n' "$(echo "$(date +%s.%N)-$T0" | bc)" "$*"; }
start() { local n=$1; shift; "$@" >$L/$n.log 2>&1 </dev/null & echo $! >$RUN/$n.pid; }
until_ok() { local n=$1 s=$2; shift 2; for ((i=0;i<s*5;i++)); do "$@" >/dev/null 2>&1 && { say "$n ok"; return 0; }; sleep 0.2; done; say "$n FAILED"; return 1; }
export KUBECONFIG=$P/admin.kubeconfig
# --- sandbox: nothing below is visible outside
mount --make-rshared /
hostname $NODE
# (/var/lib/kubelet/device-plugins is fixed in the kubelet, /run/containerd/s in the shim; these must exist, so /var/lib gets a private overlay)
mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /var/log
mkdir -p /run/ov/u /run/ov/w; mount -t overlay overlay -o lowerdir=/var/lib,upperdir=/run/ov/u,workdir=/run/ov/w /var/lib; mkdir -p /var/lib/cni /var/lib/kubelet
mkdir -p /run/lock
# kubelet insists on these machine-wide sysctls: show it files with the values instead of changing the machine
mkdir -p $RUN/sysctl
for kv in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  f=$RUN/sysctl/$(basename ${kv%=*}); echo ${kv#*=} >$f; mount --bind $f /proc/sys/${kv%=*} || say "sysctl ${kv} not masked"
done
printf "nameserver $DNS_IP\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n" >$RUN/resolv.host.conf; mount --bind $RUN/resolv.host.conf /etc/resolv.conf
ip link set lo up; ip addr add $NODE_IP/32 dev lo
ip link add cni0 type bridge; ip addr add ${PODS%.0/24}.1/24 dev cni0; ip link set cni0 up
ip route add default dev cni0 2>/dev/null || true   # kubelet and kube-proxy want a default route
echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables
for c in /sys/fs/cgroup/*/; do case $c in */unified/) ;; *) mkdir -p $c$CGROUP;; esac; done
cat /sys/fs/cgroup/cpuset/cpuset.cpus >/sys/fs/cgroup/cpuset$CGROUP/cpuset.cpus
cat /sys/fs/cgroup/cpuset/cpuset.mems >/sys/fs/cgroup/cpuset$CGROUP/cpuset.mems
say sandbox
# --- containerd (started first: independent of the control plane)
mkdir -p $CONTAINERD $RUN/cni
cat >$RUN/cni/10-lab.conflist <<J
{"cniVersion":"1.0.0","name":"lab","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":true,"hairpinMode":true,
  "ipam":{"type":"host-local","dataDir":"/var/lib/cni/networks","ranges":[[{"subnet":"$PODS"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}
J
cfg() { cat <<C
version = 2
root = "$CONTAINERD"
state = "/run/containerd"
disabled_plugins = [$1"io.containerd.snapshotter.v1.btrfs","io.containerd.snapshotter.v1.zfs","io.containerd.snapshotter.v1.devmapper","io.containerd.snapshotter.v1.aufs"]
[plugins."io.containerd.internal.v1.opt"]
  path = "/run/containerd-opt"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "handoff.test/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$RUN/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
C
}
IMPORT="ctr -a /run/containerd/containerd.sock -n k8s.io"
# first pass without the CRI plugin: drop what a killed run left behind, import images not yet there
cfg '"io.containerd.grpc.v1.cri",' >$RUN/containerd0.toml; cfg '' >$RUN/containerd.toml
start containerd0 containerd -c $RUN/containerd0.toml
until_ok containerd0 30 $IMPORT version
for c in $($IMPORT c ls -q); do $IMPORT c rm $c; done
for i in $IMAGES/*.tar; do
  n=$(basename $i .tar); [ -e $CONTAINERD/.imported-$n ] && [ $CONTAINERD/.imported-$n -nt $i ] && continue
  $IMPORT images import --no-unpack=false $i >/dev/null 2>$L/import-$n.log || $IMPORT images import $i >$L/import-$n.log 2>&1 && touch $CONTAINERD/.imported-$n; say "imported $n"
done
kill $(cat $RUN/containerd0.pid); wait $(cat $RUN/containerd0.pid)
start containerd containerd -c $RUN/containerd.toml
# --- control plane
start etcd etcd --data-dir $STATE/etcd --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
start apiserver $B/kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --advertise-address=$NODE_IP --secure-port=6443 \
  --tls-cert-file=$P/apiserver.crt --tls-private-key-file=$P/apiserver.key --client-ca-file=$P/ca.crt --token-auth-file=$P/tokens.csv \
  --authorization-mode=Node,RBAC --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=$P/sa.pub \
  --service-account-signing-key-file=$P/sa.key --service-cluster-ip-range=$SERVICES --kubelet-client-certificate=$P/apiserver-kubelet.crt \
  --kubelet-client-key=$P/apiserver-kubelet.key --kubelet-certificate-authority=$P/ca.crt --kubelet-preferred-address-types=InternalIP --allow-privileged=true
until_ok apiserver 120 kubectl get --raw=/readyz || exit 1
# not before: both exit when the bootstrap RBAC roles are not there yet
start kcm $B/kube-controller-manager --kubeconfig=$P/kcm.kubeconfig --service-account-private-key-file=$P/sa.key --root-ca-file=$P/ca.crt \
  --use-service-account-credentials --flex-volume-plugin-dir=$STATE/volumeplugins --leader-elect=false --bind-address=127.0.0.1 --authentication-kubeconfig=$P/kcm.kubeconfig --authorization-kubeconfig=$P/kcm.kubeconfig
start scheduler $B/kube-scheduler --kubeconfig=$P/scheduler.kubeconfig --leader-elect=false --bind-address=127.0.0.1 --authentication-kubeconfig=$P/scheduler.kubeconfig --authorization-kubeconfig=$P/scheduler.kubeconfig
# --- KubeRay: CRDs, its own RBAC, the operator outside the cluster
KR=$(cat "$CACHE/kuberay")
kubectl apply --server-side -f $KR/config/crd/bases -f $KR/config/rbac/role.yaml -f "$CACHE/definitions"
kubectl apply -f - <<Y
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lab-kuberay-operator}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kuberay-operator}
subjects: [{kind: User, name: lab-kuberay-operator, apiGroup: rbac.authorization.k8s.io}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: lab-coredns}
rules:
- {apiGroups: [""], resources: [endpoints, services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lab-coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lab-coredns}
subjects: [{kind: User, name: lab-coredns, apiGroup: rbac.authorization.k8s.io}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lab-proxy}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: User, name: system:kube-proxy, apiGroup: rbac.authorization.k8s.io}]
Y
kubectl wait --for=condition=Established crd --all >/dev/null; say "crds+rbac applied"
KUBECONFIG=$P/operator.kubeconfig start operator $B/ray-operator --enable-leader-election=false --log-stdout-encoder=console --metrics-addr=127.0.0.1:8088 --health-probe-bind-address=127.0.0.1:8089
# --- DNS, service proxy, node
cat >$RUN/Corefile <<C
.:53 {
  bind $DNS_IP
  errors
  cache 5
  kubernetes cluster.local in-addr.arpa {
    endpoint https://$NODE_IP:6443
    kubeconfig $P/dns.kubeconfig lab
    pods insecure
    ttl 5
  }
}
C
start coredns $B/coredns -conf $RUN/Corefile
start proxy $B/kube-proxy --kubeconfig=$P/proxy.kubeconfig --hostname-override=$NODE --cluster-cidr=$PODS --proxy-mode=iptables \
  --conntrack-max-per-core=0 --conntrack-min=0 --conntrack-tcp-timeout-established=0s --conntrack-tcp-timeout-close-wait=0s \
  --iptables-localhost-nodeports=false --bind-address=$NODE_IP --healthz-bind-address=127.0.0.1:10256 --metrics-bind-address=127.0.0.1:10249
: >$RUN/resolv.conf
cat >$RUN/kubelet.yaml <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $NODE_IP
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: $P/ca.crt}}
authorization: {mode: AlwaysAllow}
tlsCertFile: $P/kubelet-server.crt
tlsPrivateKeyFile: $P/kubelet-server.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: $CGROUP
failCgroupV1: false
failSwapOn: false
clusterDNS: [$DNS_IP]
clusterDomain: cluster.local
resolvConf: $RUN/resolv.conf
podLogsDir: /var/log/pods
volumePluginDir: $STATE/volumeplugins
healthzBindAddress: 127.0.0.1
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 200Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
localStorageCapacityIsolation: false
nodeStatusReportFrequency: 1m
syncFrequency: 10s
Y
[ "${NODE_OFF:-}" ] || start kubelet $B/kubelet --config=$RUN/kubelet.yaml --kubeconfig=$P/kubelet.kubeconfig --root-dir=$STATE/kubelet --cert-dir=$STATE/kubelet/pki --hostname-override=$NODE --node-ip=$NODE_IP --v=2
until_ok operator 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/8089'
[ "${NODE_OFF:-}" ] || until_ok "node Ready" 120 kubectl wait --for=condition=Ready node/$NODE --timeout=1s
until_ok "default serviceaccount" 30 kubectl get sa default
touch $RUN/ready; say ready
trap 'exit 0' TERM
while :; do wait -n; sleep 1; done
