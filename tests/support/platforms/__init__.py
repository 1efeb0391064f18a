"""systemd, containers, Kubernetes and Slurm on this machine."""
