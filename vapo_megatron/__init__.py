"""VAPO (arXiv 2504.05118) and its relatives on Megatron-Core, with SGLang rollouts on the same
accelerators."""

__version__ = "0.5.0"
