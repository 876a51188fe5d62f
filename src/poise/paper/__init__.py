"""The paper's experiments, made again."""
