"""Who computes the tasks of a study: this process, a pool of processes, or the workers of a cluster."""
