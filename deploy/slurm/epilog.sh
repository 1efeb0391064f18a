#!/usr/bin/env bash
# Epilog in slurm.conf: remove the files that a job's own daemon left on this node if it was killed.
#
# The site's daemon needs no cleanup: leases and plans ended with the job's processes, and cached shards serve the next
# job. The script always succeeds, because a failing epilog drains its node.

. "${BASH_SOURCE[0]%/*}/site.sh"

# With the user's rights, because the user controls the path. A symbolic link there is removed, not followed.
runuser --user "$SLURM_JOB_USER" -- rm --recursive --force -- "$job_folder" "${job_memory[@]}" ||
    tell "cannot remove $job_folder"
exit 0
