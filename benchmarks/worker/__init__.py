"""What a rank runs: ``python -m benchmarks.worker spec.json --out DIR``.

In: a frozen spec. Out: one file of events per rank. Read ``__main__`` (gate, warm-up, timed steps,
one recorded step), then ``gate``, the comparison with one process, ``data`` (its batches),
``meters`` (memory, and a rank that runs alone, for ``launcher=trace``) and ``kernels``, which sums
up such a rank's kernels.
"""
