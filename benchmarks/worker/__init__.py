"""What a rank runs: ``python -m benchmarks.worker spec.json --out DIR``.

A frozen spec comes in, one file of events per rank goes out. Read ``__main__`` first (gate,
warm-up, timed steps, one recorded step), then ``gate`` (``reference`` is one process, ``expected``
what it does, ``observed`` how a contender differs), ``memory_meter`` and ``data``;
``lone_rank`` and ``kernel_profile`` serve ``launcher=trace`` alone.
"""
