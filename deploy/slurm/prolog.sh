#!/usr/bin/env bash
# Prolog in slurm.conf: makes sure that this node's daemon responds before a job starts.
#
# It always succeeds, because a failing prolog drains its node, and jobs can run without a cache. It does not check the
# object store: health covers the daemon and its disk, so an outage of the object store neither restarts nor delays
# anything.

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
