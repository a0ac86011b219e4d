"""Cost: what an operation does on a device (FLOPs, bytes as fused, kernels, memory), and the time that it takes."""
