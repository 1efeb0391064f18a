# shellcheck shell=bash disable=SC2034
# What prolog.sh, epilog.sh and task-prolog.sh beside this file know of the site: the one file to edit.

# Where the daemon of this node listens: its --socket. Where nodes share a machine, name it by $SLURMD_NODENAME.
socket=/run/shardcache/shardcache.sock

# Where a user's own daemon has its files on this node, as own-daemon.sbatch lays them out.
job_folder=/tmp/shardcache-$SLURM_JOB_ID

# What starts a daemon that does not answer; (true) to leave that to others.
start_daemon=(systemctl start shardcache.service)

# Write a line of the node's log.
tell() {
    logger --tag shardcache "job $SLURM_JOB_ID: $*"
}
