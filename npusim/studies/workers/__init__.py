"""The executors of a study's tasks: this process, a pool of processes, or the workers of a cluster."""
