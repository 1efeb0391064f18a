#!/usr/bin/env bash
# Runs one node's daemon for the duration of a step of own-daemon.sbatch, then removes its files. With TIER_STORE, also
# runs this node's part of a tier that the job's nodes share.

set -euo pipefail
umask 077

folder=${SHARDCACHE_SOCKET%/*}
# Names of files there contain signatures.
memory=${NODE_MEMORY:-/dev/shm}/shardcache-$SLURM_JOB_ID-tier
tier=
finish() {
    if [[ -n $tier ]]; then
        kill "$tier" 2>/dev/null || true
        wait "$tier" || true
    fi
    rm --recursive --force -- "$folder" "$memory"
}
finish # what is left of the job from before it was requeued; a folder of somebody else stays, and mkdir fails
mkdir "$folder"
trap finish EXIT

if [[ -n ${TIER_STORE-} ]]; then
    mkdir "$memory"
    cp --recursive "$TIER_FILES" "$folder/tier"
    own=$folder/tier/$SLURMD_NODENAME
    # shellcheck disable=SC2086  # options are words
    shardcache cluster run --nodes "$folder/tier/nodes" --node "$SLURMD_NODENAME" --store "$TIER_STORE" \
        --owner-port "$TIER_PORT" --cache-dir "$folder/tier/cache" --run-dir "$memory" \
        --ca "$own/ca.pem" --certificate "$own/node.pem" --key "$own/node.key" ${TIER_OPTIONS-} &
    tier=$!
    # nginx writes this file once it listens.
    for _ in {1..600}; do
        [[ -s $memory/nginx.pid ]] && break
        kill -0 "$tier" 2>/dev/null || break
        sleep 0.1
    done
    # Tables of your own stay as they are: name the tier in them.
    if [[ -s $memory/nginx.pid && -z ${SHARDCACHE_ORIGIN-} ]]; then
        export SHARDCACHE_ORIGIN="[{\"match\": \"s3://\", \"tier\": \"$memory/front.sock\"}]"
    elif [[ ! -s $memory/nginx.pid ]]; then
        echo "the tier does not start; this node's daemon reads from the store itself" >&2
    fi
fi

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
