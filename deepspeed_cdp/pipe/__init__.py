"""Cyclic pipelines for DeepSpeed's PipelineModule: one rank per stage, a pyramid of ranks, or one device (docs/pipeline.md)."""
