#!/usr/bin/env bash
# TaskProlog in slurm.conf: tell each task where its node's daemon is. What it prints becomes the task's environment.
#
# A job that brings its own daemon has said so already. Rank, number of tasks and job name are Slurm's own variables,
# which the dataset reads.

. "${BASH_SOURCE[0]%/*}/site.sh"

if [[ -z ${SHARDCACHE_SOCKET-} ]]; then
    echo "export SHARDCACHE_SOCKET=$socket"
fi
