#!/bin/bash
# inside.sh COMMAND...: runs it in the sandbox (kubectl, curl, ctr, ...).
. "$(dirname "$(readlink -f "$0")")/env.sh"
export KUBECONFIG=$RUN/pki/admin.kubeconfig
exec nsenter -t "$(cat "$RUN/init.pid")" -n -m -u -p --wd="$PWD" -- "$@"
