"""What happens at a cut: liveness, the computation cache, the pipeline, fallback."""
