"""ZeroPP: pipeline parallelism over fully sharded data parallelism, without tensor parallelism."""
