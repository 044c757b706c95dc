"""DeepSpeed's 3D parallelism: its ``PipelineModule`` with TP x PP x DP and ZeRO-1.

In: a ``Task`` and ``DeepSpeedKnobs``. Out: a ``Plan`` whose programs are DeepSpeed's own 1F1B, and
a trainer per rank that lets DeepSpeed's ``PipelineEngine`` run it. Read ``contender``,
``tensor_parallel`` (DeepSpeed has no tensor parallelism for pipelines, so this cuts the layers) and
``trainer``. ``private_names`` has what DeepSpeed does not document.
"""
