#!/usr/bin/env bash
# TaskProlog in slurm.conf: tells each task where its node's daemon is. Its output becomes the task's environment.
#
# A job that brings its own daemon has set the variable already. The dataset reads rank, number of tasks and job name
# from Slurm's own variables.

. "${BASH_SOURCE[0]%/*}/site.sh"

if [[ -z ${SHARDCACHE_SOCKET-} ]]; then
    echo "export SHARDCACHE_SOCKET=$socket"
fi
