#!/usr/bin/env bash
# Runs one node's daemon for the duration of a step of own-daemon.sbatch, then removes its files.

set -euo pipefail
umask 077

folder=${SHARDCACHE_SOCKET%/*}
remove() {
    rm --recursive --force -- "$folder"
}
remove # what is left of the job from before it was requeued; a folder of somebody else stays, and mkdir fails
mkdir "$folder"
trap remove EXIT

shardcache serve &
daemon=$!

# Depending on its plugins, Slurm signals only this script or every process of the step. A daemon that is signalled twice
# ends immediately, which loses no cached shard.
trap 'kill "$daemon" 2>/dev/null || true' TERM INT

status=0
while kill -0 "$daemon" 2>/dev/null; do
    status=0
    wait "$daemon" || status=$?
done
exit "$status"
