"""The contenders that ZeroPP is compared with, one folder per contender.

In: a ``Task`` (what is trained, on which cluster) and the contender's knobs. Out: a ``Plan``, and
for the contenders that run here a trainer per rank. In a folder read ``contender`` (what
can be set, from knobs to a Plan, what the tuner tries), then ``trainer`` (what runs per rank).
``public_3d`` is priced and does not run.
The modules beside the folders are what several contenders share: ``fsdp2`` (FSDP2), ``blocks``
(recomputation and compilation), ``private_names``
(names that torch may change).
"""
