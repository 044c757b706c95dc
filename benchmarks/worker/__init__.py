"""What a rank runs: ``python -m benchmarks.worker spec.json --out DIR``.

In: a frozen spec. Out: one file of events per rank. Read ``__main__`` (gate, warm-up, timed steps,
one recorded step), then ``gate``, the comparison with one process, ``data`` (its batches),
``meters`` (memory, and a rank that runs alone, for ``launcher=trace``) and ``kernels``, which sums
up such a rank's kernels.
"""

import os

# Of torch's allocator, for every contender alike, before torch is imported, which may read it then;
# results/reference/memory/reserved.csv says why.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # torch's earlier name of the same
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
