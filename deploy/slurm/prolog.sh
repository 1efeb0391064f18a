#!/usr/bin/env bash
# Prolog in slurm.conf: see to it that this node's daemon answers before a job begins.
#
# It always succeeds, for a prolog that fails drains its node, and jobs can do without a cache. Nor does it look at the
# store: health says how the daemon and its disk are, so an outage of the store restarts nothing and delays nobody.

. "${BASH_SOURCE[0]%/*}/site.sh"

answers() {
    curl --silent --fail --max-time 2 --output /dev/null --unix-socket "$socket" http://shardcache/v1/health
}

if ! answers; then
    tell "no daemon answers at $socket; starting it"
    if ! timeout 15 "${start_daemon[@]}" || ! answers; then
        tell "still none; jobs go on without it where they may: journalctl --unit shardcache"
    fi
fi
exit 0
