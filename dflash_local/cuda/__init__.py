"""Our own kernels on NVIDIA GPUs: compiled for the GPU in hand, and tried before they are used."""
