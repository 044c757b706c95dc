"""torch.distributed.pipelining with FSDP2 and DTensor's tensor parallelism: torch's own schedules.

In: a ``Task`` and ``TorchPPKnobs``. Out: a ``Plan`` in the order of torch's schedule classes, and a
trainer per rank that lets torch's runtime run them. Read ``contender`` (with
``dualpipev``), then ``trainer``. ``private_names`` has the names of torch that may change.
"""
