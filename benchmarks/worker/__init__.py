"""What a rank runs: ``python -m benchmarks.worker spec.json --out DIR``.

In: a frozen spec. Out: one file of events per rank. Read ``__main__`` (gate, warm-up, timed steps,
one recorded step), then ``gate``, the comparison with one process (``reference`` is that process,
``expected`` what it does, ``observed`` how a contender differs), ``memory_meter`` and ``data``.
``loaded_code`` says which code the rank runs.
Only ``launcher=trace`` uses ``lone_rank`` and ``kernel_profile``.
"""
