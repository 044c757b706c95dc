"""DeepSpeed's 3D parallelism: PipelineModule with TP x PP x DP and ZeRO-1."""
