# shellcheck shell=bash disable=SC2034
# Site settings of prolog.sh, epilog.sh and task-prolog.sh: the only file to edit.

# Socket of this node's daemon (its --socket). If nodes share a machine, include $SLURMD_NODENAME in the name.
socket=/run/shardcache/shardcache.sock

# Socket at which this node's part of the cluster's tier serves its daemon, /run/shardcache-tier/front.sock by default;
# empty if there is no tier.
tier=

# Folders of a user's own daemon on this node, on disk and in memory, as laid out by own-daemon.sbatch and
# node-daemon.sh.
job_folder=/tmp/shardcache-$SLURM_JOB_ID
job_memory=(/dev/shm/shardcache-"$SLURM_JOB_ID"-*)

# Command that starts a daemon that does not respond; (true) to start none.
start_daemon=(systemctl start shardcache.service)

# Command that starts this node's part of the tier if it does not respond; (true) to start none.
start_tier=(systemctl start shardcache-tier.service)

# Write a line to the node's log.
tell() {
    logger --tag shardcache "job $SLURM_JOB_ID: $*"
}
