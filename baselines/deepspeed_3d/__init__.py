"""DeepSpeed: with a pipeline its ``PipelineModule`` (TP x PP x DP, ZeRO-1), and without one its
ordinary engine (TP x DP, ZeRO-1 or ZeRO-2, whose reductions overlap the backward, or ZeRO-3 over
all ranks).

In: a ``Task`` and ``DeepSpeedKnobs``, or ``Zero3Knobs``. Out: a ``Plan`` whose programs are
DeepSpeed's own, and a trainer per rank that lets one of DeepSpeed's engines run it. Read
``contender``, ``zero3`` (ZeRO-3 is a contender of its own, with settings of its own),
``tensor_parallel`` (DeepSpeed has no tensor parallelism for pipelines, so this cuts the layers),
``trainer``, and its two engines ``pipeline`` and ``ordinary``. ``private_names`` has what DeepSpeed
does not document. ``zeropp/price/zero3.py`` says what ZeRO-3 sends when.

What DeepSpeed 0.19.8 does not have, and where its code says so:

* Sequence parallelism beside tensor parallelism. Its own is Ulysses', which refuses TP
  (``module_inject/auto_ep_folding.py``: "mutually exclusive"; ``runtime/zero/stage_1_and_2.py``
  takes the model-parallel group for one rank where the mpu has ``initialize_sequence_parallel``).
  Its engines sum gradients over data-parallel ranks alone (``runtime/engine.py``:
  ``_reduce_non_expert_gradients``), and so not those of norms that see slices of a sequence.
* ZeRO-2 in a pipeline (``runtime/pipe/engine.py``: "incompatible with pipeline parallelism"), and
  overlap of a pipeline's reduction (``runtime/engine.py``, ``_configure_zero_optimizer``: "will be
  disabled").
* In ``runtime/pipe/dualpipev.py`` it has DualPipeV, which runs full backwards, needs twice as many
  microbatches as pipeline ranks, and refuses to send slices of boundaries under TP. It is not
  among this contender's schedules.
"""
