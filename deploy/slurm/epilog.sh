#!/usr/bin/env bash
# Epilog in slurm.conf: remove what a job's own daemon left on this node, should it have been killed.
#
# Of the site's daemon there is nothing to clean up: leases and plans ended with the job's processes, and what is cached
# is for the next job. It always succeeds, for an epilog that fails drains its node.

. "${BASH_SOURCE[0]%/*}/site.sh"

# With the user's rights, for the user chose what lies there. A link in its place is removed and not followed.
runuser --user "$SLURM_JOB_USER" -- rm --recursive --force -- "$job_folder" ||
    tell "cannot remove $job_folder"
exit 0
