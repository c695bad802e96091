#!/bin/bash
# Keys, tokens and kubeconfigs, anew for every run.
set -eu; . "$(dirname "$(readlink -f "$0")")/env.sh"
P=$RUN/pki; mkdir -p "$P"; chmod 700 "$P"; cd "$P"
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=handoff-lab 2>/dev/null
crt() { # name subject san
  openssl req -newkey rsa:2048 -nodes -keyout $1.key -out $1.csr -subj "$2" 2>/dev/null
  openssl x509 -req -in $1.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out $1.crt \
    -extfile <(echo "subjectAltName=$3"; echo "extendedKeyUsage=serverAuth,clientAuth") 2>/dev/null
}
crt apiserver /CN=kube-apiserver IP:127.0.0.1,IP:$NODE_IP,IP:10.96.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
crt kubelet-server /CN=$NODE IP:127.0.0.1,IP:$NODE_IP,DNS:$NODE
crt apiserver-kubelet /O=system:masters/CN=apiserver-kubelet DNS:apiserver-kubelet
openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
: >tokens.csv
kc() { # file user group
  local t; t=$(openssl rand -hex 16); echo "$t,$2,$2${3:+,\"$3\"}" >>tokens.csv
  cat >$1.kubeconfig <<K
apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "https://$NODE_IP:6443", certificate-authority: $P/ca.crt}}]
users: [{name: u, user: {token: $t}}]
contexts: [{name: lab, context: {cluster: lab, user: u, namespace: default}}]
current-context: lab
K
}
kc admin admin system:masters
kc kcm system:kube-controller-manager
kc scheduler system:kube-scheduler
kc kubelet system:node:$NODE system:nodes
kc proxy system:kube-proxy
kc dns lab-coredns
kc operator lab-kuberay-operator
chmod 600 *.key *.kubeconfig tokens.csv
