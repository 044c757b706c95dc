"""FSDP2 alone: ZeRO-3, optionally with replicas, no pipeline and no tensor parallelism."""
