#!/bin/sh
# enter_namespace.sh HOST COMMAND...: the remote-shell agent of namespaces_test.py. HOST is 10.77.0.N; the command runs in
# the network namespace ${DSV41_NAMESPACE}N under the host name nodeN.
host=$1
shift
number=${host##*.}
exec ip netns exec "${DSV41_NAMESPACE}$number" unshare -u sh -c 'hostname "$0" && exec sh -c "$1"' "node$number" "$*"
