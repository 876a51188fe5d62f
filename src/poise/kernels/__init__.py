"""Triton kernels, imported only where a GPU asks for them; what starts them is in ``link`` and ``calibrators``."""
