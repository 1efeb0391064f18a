#!/usr/bin/env bash
# Prolog in slurm.conf: makes sure that this node's daemon, and its part of the site's tier, respond before a job starts.
#
# It always succeeds, because a failing prolog drains its node, and jobs can run without a cache. It does not check the
# object store: health covers the daemon and its disk, so an outage of the object store neither restarts nor delays
# anything.

. "${BASH_SOURCE[0]%/*}/site.sh"

answers() {
    curl --silent --fail --noproxy '*' --max-time 2 --output /dev/null "$@"
}
daemon_answers() {
    answers --unix-socket "$socket" http://shardcache/v1/health
}
tier_answers() {
    [[ -z ${tier-} ]] || answers --unix-socket "$tier" http://tier/.shardcache/peers
}

# Start what does not answer: `daemon` or `tier`, and the command that starts it.
ensure() {
    local name=$1
    shift
    if ! "${name}_answers"; then
        tell "no $name answers; starting it"
        if ! timeout 15 "$@" || ! "${name}_answers"; then
            tell "still none; jobs go on without it where they may: journalctl --unit shardcache --unit shardcache-tier"
        fi
    fi
}

ensure tier "${start_tier[@]}"
ensure daemon "${start_daemon[@]}"
exit 0
