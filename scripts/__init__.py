"""What `make` runs: the build, digests of sources, and the recorded GPU run."""
