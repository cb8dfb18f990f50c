#!/usr/bin/env bash
# Start a script on two hosts of this machine, which a link of a given rate joins:
#
#     ./two_hosts.sh 20mbit throttled.py micro 90
#
# The hosts are network namespaces. Root is not needed where users may make namespaces; needs util-linux and iproute2.
# RANKS=2 in the environment starts two ranks on each.
set -euo pipefail
if [ -z "${IN_NAMESPACES:-}" ]; then
  IN_NAMESPACES=1 exec unshare --user --map-root-user --net --mount "$0" "$@"
fi
rate=$1 && shift
mount -t tmpfs tmpfs /run # where ip keeps its namespaces; only this script sees the new one
for host in 1 2; do
  ip netns add "host$host"
  ip -n "host$host" link set lo up
done
ip link add link1 netns host1 type veth peer name link2 netns host2
for host in 1 2; do
  ip -n "host$host" addr add "10.9.0.$host/24" dev "link$host"
  ip -n "host$host" link set "link$host" up
  tc -n "host$host" qdisc add dev "link$host" root tbf rate "$rate" burst 64kb latency 400ms # a token bucket
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for host in 1 2; do
  GLOO_SOCKET_IFNAME=link$host OMP_NUM_THREADS=1 nsenter --net="/run/netns/host$host" \
    python -m torch.distributed.run --nnodes 2 --node-rank $((host - 1)) --nproc-per-node "${RANKS:-1}" \
    --master-addr 10.9.0.1 --master-port 29500 "$@" &
done
wait -n && wait -n
