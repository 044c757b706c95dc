"""torch.distributed.pipelining with FSDP2 and DTensor tensor parallelism, torch's own schedules."""
