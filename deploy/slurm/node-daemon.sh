#!/usr/bin/env bash
# One node's daemon for as long as a step of own-daemon.sbatch lasts, and the end of its files.

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

# By its plugins Slurm signals this script alone or every process of the step. A daemon that is told twice ends at once,
# which loses nothing that is cached.
trap 'kill "$daemon" 2>/dev/null || true' TERM INT

status=0
while kill -0 "$daemon" 2>/dev/null; do
    status=0
    wait "$daemon" || status=$?
done
exit "$status"
