# shellcheck shell=bash disable=SC2034
# Site settings of prolog.sh, epilog.sh and task-prolog.sh: the only file to edit.

# Socket of this node's daemon (its --socket). If nodes share a machine, include $SLURMD_NODENAME in the name.
socket=/run/shardcache/shardcache.sock

# Folder of a user's own daemon on this node, as laid out by own-daemon.sbatch.
job_folder=/tmp/shardcache-$SLURM_JOB_ID

# Command that starts a daemon that does not respond; (true) to start none.
start_daemon=(systemctl start shardcache.service)

# Write a line to the node's log.
tell() {
    logger --tag shardcache "job $SLURM_JOB_ID: $*"
}
